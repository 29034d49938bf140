"""The states of recurrent layers, in numbered slots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

StateName = tuple[str, int, int]
"""A state: "conv" or "recurrent", the layer's number, and the state's number in the layer."""

StateShapes = Mapping[StateName, tuple[tuple[int, ...], torch.dtype]]


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


def bytes_per_state(shapes: StateShapes) -> int:
    """Bytes of one slot in all layers."""
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes.values())
