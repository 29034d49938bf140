"""Recurrent layers of the decoder loop in torch: short convolutions, delta nets and Mamba 2.

They compute what `kernels/native/recurrence.h` does, over the flat step and the slots of its
sequences. Nothing waits for the device, so that CUDA graphs can capture it, if the recurrence
itself is a kernel (`triton/recurrence.py`): `recur` is for checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.nn import functional as F

from radixcache.kernels.recurrence import Recurrence, Slots, StateName, StepStates, Tokens
from radixcache.kernels.spec import DeltaNet, Mamba2, ShortConv, Weights

_VECTORS = ("conv", "conv.bias", "rate", "rate_bias", "skip", "mixer_norm")

_GATHERED = 1 << 24
"""Most numbers that a convolution gathers at once."""


class RecurrentMixer:
    """A recurrent layer without its output linear.

    Args:
        linear: makes one linear of several weights, side by side.
        eps: epsilon of the output's norm.
    """

    def __init__(
        self,
        spec: ShortConv | DeltaNet | Mamba2,
        weights: Weights,
        linear: Callable[..., Any],
        recur: Recurrence | None,
        eps: float,
    ) -> None:
        self._spec, self._recur, self._eps = spec, cast(Recurrence, recur), eps
        names, of_latents = spec.products if isinstance(spec, DeltaNet) else ({"in": 0}, {})
        self._inputs = linear(*((weights[n], weights.get(f"{n}.bias")) for n in names))
        self._of_latents = [linear((weights[name], None)) for name in of_latents]
        self._w = {name: weights[name] for name in _VECTORS if name in weights}
        if isinstance(spec, DeltaNet):  # queries and keys are normed to these root mean squares
            each = weights["rate"].new_tensor([[spec.key**-1.0], [spec.key**-0.5]])
            self._lengths = each.repeat_interleave(spec.key_heads, 0)

    def __call__(
        self, x: torch.Tensor, states: Mapping[StateName, torch.Tensor], step: StepStates
    ) -> torch.Tensor:
        """[T, out_width], the output for rows [T, hidden]; updates the states of the layer."""
        conv, *state = states.values()
        spec, found = self._spec, self._inputs(x)
        if isinstance(spec, ShortConv):
            before, after, values = found.float().chunk(3, 1)
            return (after * self._convolve(before * values, conv, step)).to(x.dtype)
        mix = self._delta_net if isinstance(spec, DeltaNet) else self._mamba
        return mix(found, conv, state[0], step).to(x.dtype)

    def _delta_net(
        self, found: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, step: StepStates
    ) -> torch.Tensor:
        net, w = self._spec, self._w
        assert isinstance(net, DeltaNet)
        sizes = [net.rank or net.decays, net.rank or net.out_width]
        rows, beta, alpha, z = found.split([net.channels, net.heads, *sizes], 1)
        if self._of_latents:
            alpha, z = (of(x) for of, x in zip(self._of_latents, (alpha, z), strict=True))
        keys = net.key_heads * net.key
        mixed = self._convolve(rows, conv, step)
        both, value = F.silu(mixed, inplace=True).split([2 * keys, net.out_width], 1)
        both = both.unflatten(1, (2 * net.key_heads, net.key))
        both = F.rms_norm(both, both.shape[2:], eps=1e-6 / net.key) * self._lengths
        query, key = both.split(net.key_heads, 1)
        alpha = (alpha.float() + w["rate_bias"]).unflatten(1, (net.heads, -1))
        rate = w["rate"][:, None]
        if net.bound is None:
            fade = (rate * F.softplus(alpha)).exp()
        else:
            fade = (net.bound * (-rate * alpha).sigmoid()).exp()
        value = value.unflatten(1, (net.heads, net.value))
        tokens = Tokens(query, key, value, fade, beta.float().sigmoid(), True)
        out = self._recur(state, tokens, step.slots)
        out = F.rms_norm(out, out.shape[2:], w["mixer_norm"], self._eps)
        return out.flatten(1) * (z.float().sigmoid() if net.by_channel else F.silu(z.float()))

    def _mamba(
        self, found: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, step: StepStates
    ) -> torch.Tensor:
        mamba, w = self._spec, self._w
        assert isinstance(mamba, Mamba2)
        z, rows, dt = found.split([mamba.out_width, mamba.channels, mamba.heads], 1)
        keys = mamba.groups * mamba.state
        mixed = self._convolve(rows, conv, step)
        value, *pair = F.silu(mixed, inplace=True).split([mamba.out_width, keys, keys], 1)
        key, query = (t.unflatten(1, (mamba.groups, mamba.state)) for t in pair)
        value = value.unflatten(1, (mamba.heads, mamba.value))
        gain = F.softplus(dt.float() + w["rate_bias"]).clamp(mamba.least, mamba.most)
        fade = (w["rate"] * gain).exp()[..., None]
        tokens = Tokens(query, key, value, fade, gain, False)
        out = self._recur(state, tokens, step.slots) + w["skip"][:, None] * value
        gated = out.flatten(1) * F.silu(z.float())
        parts = gated.unflatten(1, (mamba.groups, -1))
        return F.rms_norm(parts, parts.shape[2:], eps=self._eps).flatten(1) * w["mixer_norm"]

    def _convolve(self, x: torch.Tensor, conv: torch.Tensor, step: StepStates) -> torch.Tensor:
        """[T, channels] float32, the convolution over each row and those before; saves inputs."""
        taps, weight = step.taps[self._spec.width], self._w["conv"]
        held = conv.index_select(0, step.read).masked_fill_(step.is_new, 0)
        inputs = torch.cat([held.flatten(0, 1).to(x.dtype), x])
        last = inputs.index_select(0, step.saved_taps[self._spec.width])
        conv.index_copy_(0, step.saved, last.float().view(len(step.saved), *conv.shape[1:]))
        found = []
        for part in taps.split(max(1, _GATHERED // weight.numel())):
            gathered = inputs.index_select(0, part.flatten()).view(*part.shape, -1)
            found.append((gathered * weight).sum(1))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out + self._w["conv.bias"] if "conv.bias" in self._w else out


def recur(states: torch.Tensor, tokens: Tokens, slots: Slots) -> torch.Tensor:
    """A `Recurrence`, token by token."""
    starts, read, write, keeps = (numbers.tolist() for numbers in slots)
    out, each = torch.empty_like(tokens.value), tokens.value.shape[1] // tokens.key.shape[1]
    query, key = (t.repeat_interleave(each, 1) for t in (tokens.query, tokens.key))
    for first, end, before, after in zip(starts, starts[1:], read, write, strict=False):
        state = states[before].clone() if before >= 0 else torch.zeros_like(states[after])
        for row in range(first, end):
            state *= tokens.fade[row, :, :, None]
            added = tokens.value[row]
            if tokens.delta:
                added = added - torch.einsum("hkv,hk->hv", state, key[row])
            state += key[row, :, :, None] * (added * tokens.gain[row, :, None])[:, None]
            out[row] = torch.einsum("hkv,hk->hv", state, query[row])
            if keeps[row] >= 0:
                states[keeps[row]] = state
        states[after] = state
    return out
