"""The recurrence of gated delta nets and Mamba 2 in plain torch, token by token."""

from __future__ import annotations

import torch

from radixcache.kernels.recurrence import Slots, Tokens


def loop(states: torch.Tensor, tokens: Tokens, slots: Slots) -> torch.Tensor:
    """A `Recurrence`."""
    starts, read, write, keeps = (numbers.tolist() for numbers in slots)
    out, each = torch.empty_like(tokens.value), tokens.value.shape[1] // tokens.key.shape[1]
    query, key = (t.repeat_interleave(each, 1) for t in (tokens.query, tokens.key))
    for first, end, before, after in zip(starts, starts[1:], read, write, strict=False):
        state = states[before].clone() if before >= 0 else torch.zeros_like(states[after])
        for row in range(first, end):
            state *= tokens.fade[row, :, None, None]
            added = tokens.value[row]
            if tokens.delta:
                added = added - torch.einsum("hkv,hk->hv", state, key[row])
            state += key[row, :, :, None] * (added * tokens.gain[row, :, None])[:, None]
            out[row] = torch.einsum("hkv,hk->hv", state, query[row])
            if keeps[row] >= 0:
                states[keeps[row]] = state
        states[after] = state
    return out
