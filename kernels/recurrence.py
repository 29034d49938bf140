"""The recurrence of gated delta nets and of Mamba 2, as a kernel computes it over state slots.

Each token multiplies a head's state [key, value] by a decay (`fade`), adds key times value to it,
and reads it with its query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


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


class Tokens(NamedTuple):
    """The inputs of T tokens to a layer's recurrence, float32.

    Attributes:
        query, key: [T, groups, key]; each group serves as many heads.
        value: [T, heads, value].
        fade: [T, heads] the decay, a factor on the state.
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
