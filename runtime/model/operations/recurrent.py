"""Recurrent layers of the decoder loop in torch: short convolutions, delta nets and Mamba 2.

They compute what `kernels/native/recurrent.h` does, over the flat step and the slots of its
sequences. Nothing waits for the device, so that CUDA graphs can capture it; the recurrence itself
is a kernel (`kernels/triton_recurrence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F

from radixcache.kernels.recurrence import Recurrence, Slots, Tokens
from radixcache.runtime.model.description import DeltaNet, Mamba2, ShortConv, Weights
from radixcache.runtime.model.state_pool import StateName

_VECTORS = ("conv", "conv.bias", "rate", "rate_bias", "skip", "mixer_norm")

_GATHERED = 1 << 24
"""Most numbers that a convolution gathers at once."""


class StepStates(NamedTuple):
    """Where a step's sequences have their states, on the device.

    Attributes:
        slots: for the recurrence.
        read: [B] int64 the slots to read; any slot for a sequence without a state.
        is_new: [B, 1, 1] whether a sequence has no state yet.
        saved: [N] int64 the slots that get the inputs of a convolution up to a row.
        taps: by a convolution's width: [T, width] where each row's inputs are in all inputs:
            first those in the states, sequence by sequence, then the rows.
        saved_taps: by width: [N * (width - 1)] where the inputs to save are.
    """

    slots: Slots
    read: torch.Tensor
    is_new: torch.Tensor
    saved: torch.Tensor
    taps: dict[int, torch.Tensor]
    saved_taps: dict[int, torch.Tensor]

    @classmethod
    def of(cls, arrays: Sequence[torch.Tensor], widths: set[int]) -> StepStates:
        """Compute the indices from the `slot_arrays`, on the device."""
        starts, read, write, keeps, owners, rows, saved = arrays
        at = torch.arange(len(owners), device=owners.device)
        since = at - starts.index_select(0, owners)
        taps, saved_taps = {}, {}
        for width in widths:
            back = torch.arange(width - 1, -1, -1, device=owners.device)
            new = (at + len(read) * (width - 1))[:, None] - back
            held = (owners * (width - 1) + since)[:, None] + (width - 1 - back)
            taps[width] = torch.where(since[:, None] >= back, new, held)
            saved_taps[width] = taps[width].index_select(0, rows)[:, 1:].flatten()
        return cls(
            Slots(starts, read, write, keeps), read.clamp(min=0).long(),
            (read < 0)[:, None, None], saved.long(), taps, saved_taps,
        )  # fmt: skip


class RecurrentMixer:
    """A recurrent layer without its output product.

    Args:
        product: makes one product of several weights, side by side.
        eps: epsilon of the output's norm.
    """

    def __init__(
        self,
        spec: ShortConv | DeltaNet | Mamba2,
        weights: Weights,
        product: Callable[..., Any],
        recur: Recurrence | None,
        eps: float,
    ) -> None:
        self._spec, self._recur, self._eps = spec, cast(Recurrence, recur), eps
        names = ["in", "z", "ba"] if isinstance(spec, DeltaNet) else ["in"]
        self._inputs = product(*((weights[n], weights.get(f"{n}.bias")) for n in names))
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
        rows, z, beta, alpha = found.split([net.channels, net.out_width, net.heads, net.heads], 1)
        keys = net.key_heads * net.key
        mixed = self._convolve(rows, conv, step)
        both, value = F.silu(mixed, inplace=True).split([2 * keys, net.out_width], 1)
        both = both.unflatten(1, (2 * net.key_heads, net.key))
        both = F.rms_norm(both, both.shape[2:], eps=1e-6 / net.key) * self._lengths
        query, key = both.split(net.key_heads, 1)
        fade = (w["rate"] * F.softplus(alpha.float() + w["rate_bias"])).exp()
        value = value.unflatten(1, (net.heads, net.value))
        tokens = Tokens(query, key, value, fade, beta.float().sigmoid(), True)
        out = self._recur(state, tokens, step.slots)
        out = F.rms_norm(out, out.shape[2:], w["mixer_norm"], self._eps)
        return out.flatten(1) * F.silu(z.float())

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
        tokens = Tokens(query, key, value, (w["rate"] * gain).exp(), gain, False)
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
