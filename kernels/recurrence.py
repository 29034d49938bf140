"""The recurrence of gated delta nets and of Mamba 2, as a kernel computes it over state slots.

Each token multiplies a head's state [key, value] by a decay (`fade`), or each of its rows by one,
adds key times value to it, and reads it with its query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

StateName = tuple[str, int, int]
"""A state: "conv" or "recurrent", the layer's number, and the state's number in the layer."""

StateShapes = Mapping[StateName, tuple[tuple[int, ...], torch.dtype]]


class Slots(NamedTuple):
    """Which rows of a step, and which slots of states, belong to its B sequences; int32.

    Attributes:
        starts: [B + 1] offsets of each sequence's rows.
        read: [B] the slot of the state before them; -1 for zeros.
        write: [B] the slot for the state after them. None of them is another sequence's `read`.
        keeps: [T] the slot that gets the state after a row as well; -1 for none.
    """

    starts: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    keeps: torch.Tensor


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
            Slots(*(x.int() for x in (starts, read, write, keeps))), read.clamp(min=0).long(),
            (read < 0)[:, None, None], saved.long(), taps, saved_taps,
        )  # fmt: skip


class Tokens(NamedTuple):
    """The inputs of T tokens to a layer's recurrence, float32.

    Attributes:
        query, key: [T, groups, key]; each group serves as many heads.
        value: [T, heads, value].
        fade: [T, heads, 1 or key] the decay, a factor on the state, or on each of its rows.
        gain: [T, heads] the factor on the update.
        delta: the delta rule: the value is reduced by what the decayed state reads for the key.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    fade: torch.Tensor
    gain: torch.Tensor
    delta: bool


Recurrence = Callable[[torch.Tensor, Tokens, Slots], torch.Tensor]
"""Updates the states [slots, heads, key, value] float32; returns [T, heads, value], the results of
the queries."""
