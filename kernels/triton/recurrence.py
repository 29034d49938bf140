"""The recurrence of gated delta nets and of Mamba 2 in Triton, which comes with torch for GPUs.

A program holds some columns of a head's state in registers over all new tokens of a sequence.
FlashInfer's kernels for delta nets need heads of 128 and SM90, update states in place and keep them
only at multiples of 64 tokens; here a state is read in one slot, written to another,
and kept after any token. A row's result does not depend on the rest of the batch.

It has run in Triton's interpreter and was compiled ahead (`make test-gpu`), never on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixcache.kernels.recurrence import Slots, Tokens

STATE = 2048  # numbers of a program: with one warp, 64 registers of each thread


@torch.inference_mode()
def recur(states: torch.Tensor, tokens: Tokens, slots: Slots) -> torch.Tensor:
    """The recurrence, as `Recurrence` describes it."""
    query, key, value, fade, gain, delta = tokens
    _, heads, size = value.shape
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    columns = columns_of(key.shape[2])
    grid = triton.cdiv(size, columns), heads, len(slots.read)
    _recur[grid](
        states, query, key, value, fade.contiguous(), gain.contiguous(), out, *slots,
        query.stride(0), key.stride(0), value.stride(0), HEADS=heads,
        GROUP=heads // key.shape[1], KEY=key.shape[2], FADES=fade.shape[2],
        KEY_2=triton.next_power_of_2(key.shape[2]), VALUE=size, COLUMNS=columns, DELTA=delta,
        num_warps=1,
    )  # fmt: skip
    return out


def columns_of(key: int) -> int:
    """How many columns a program holds."""
    return max(1, min(16, STATE // triton.next_power_of_2(key)))


@triton.jit
def _recur(
    states, query, key, value, fade, gain, out, starts, read, write, keeps, query_row, key_row,
    value_row, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, FADES: tl.constexpr,
    KEY_2: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Update columns of a head's state over the new tokens of a sequence."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    k, v = tl.arange(0, KEY_2), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k < KEY, v < VALUE
    inside = in_k[:, None] & in_v[None, :]
    place = states + (head * KEY + k[:, None]) * VALUE + v[None, :]
    slot = tl.load(read + sequence).to(tl.int64)
    state = tl.load(place + slot * HEADS * KEY * VALUE, mask=inside & (slot >= 0), other=0.0)
    group = head // GROUP * KEY + k
    first = tl.load(starts + sequence)
    at = first.to(tl.int64)  # not the loop's: Triton's interpreter makes that a Python int
    for _ in range(first, tl.load(starts + sequence + 1)):
        q = tl.load(query + at * query_row + group, mask=in_k, other=0.0)
        key_ = tl.load(key + at * key_row + group, mask=in_k, other=0.0)
        added = tl.load(value + at * value_row + head * VALUE + v, mask=in_v, other=0.0)
        if FADES == 1:
            state *= tl.load(fade + at * HEADS + head)
        else:
            state *= tl.load(fade + (at * HEADS + head) * KEY + k, mask=in_k, other=0.0)[:, None]
        if DELTA:
            added -= tl.sum(state * key_[:, None], 0)
        state += key_[:, None] * (added * tl.load(gain + at * HEADS + head))[None, :]
        result = tl.sum(state * q[:, None], 0)
        tl.store(out + (at * HEADS + head) * VALUE + v, result, mask=in_v)
        slot = tl.load(keeps + at).to(tl.int64)
        if slot >= 0:
            tl.store(place + slot * HEADS * KEY * VALUE, state, mask=inside)
        at += 1
    slot = tl.load(write + sequence).to(tl.int64)
    tl.store(place + slot * HEADS * KEY * VALUE, state, mask=inside)
