"""The states of recurrent layers, in numbered slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.recurrence import StateName, StateShapes
from radixcache.states.recurrent import SequenceStates


class StatePool:
    """The state tensors of all slots, [num_slots, ...] each, on a GPU with one slot more: the last,
    `num_slots`, for rows that only pad a batch."""

    def __init__(self, shapes: StateShapes, num_slots: int, device: torch.device) -> None:
        self.num_slots, count = num_slots, num_slots + (device.type != "cpu")
        self.tensors = {
            name: torch.zeros(count, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        self.of_layer: dict[int, dict[StateName, torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            self.of_layer.setdefault(name[1], {})[name] = tensor


def slot_arrays(
    batch: PagedBatch, states: Sequence[SequenceStates], spare: int | None = None
) -> list[NDArray[np.integer]] | None:
    """The arrays of a step for `StepStates`.

    Args:
        states: of each sequence of `batch`.
        spare: a slot that nobody reads. If it is given, the arrays are as long for all batches of
            as many sequences and rows, or None if more states are kept than there are sequences.
    """
    count, starts = len(states), batch.qo_indptr
    pairs = [
        (end - 1, state.write)
        for state, end, length in zip(states, starts[1:], batch.query_lens, strict=True)
        if length
    ]
    kept = [
        (start + n - 1, slot)
        for state, start in zip(states, starts[:-1], strict=True)
        for n, slot in state.keeps
    ]
    keeps = np.full(starts[-1], -1, np.int32)
    for row, slot in kept:
        keeps[row] = slot
    pairs += kept
    if spare is not None:
        if len(pairs) > 2 * count:
            return None
        pairs += [(0, spare)] * (2 * count - len(pairs))
    rows, slots = np.array(pairs, np.int32).T
    read = np.array([state.read for state in states], np.int32)
    write = np.array([state.write for state in states], np.int32)
    owners = np.repeat(np.arange(count, dtype=np.int32), batch.query_lens)
    return [starts, read, write, keeps, owners, rows, slots]
