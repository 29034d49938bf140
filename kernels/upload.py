"""Copies numbers to the device and back without waiting: a step's index arrays in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

_ALIGN = 4  # int32s: 16 bytes


class Staged(NamedTuple):
    """An int32 array on host and device: views that the next upload overwrites."""

    host: torch.Tensor  # pinned
    device: torch.Tensor


class Upload:
    """One pinned host buffer and one device buffer, both growing to the largest step.

    Args:
        fixed: a capacity in int32s that never grows, so that an array's device address depends only
            on the lengths of the arrays before it, as CUDA graphs need.
    """

    def __init__(self, device: torch.device, fixed: int = 0) -> None:
        self._place = device
        self._is_fixed = bool(fixed)
        self._grow(fixed or 1 << 12)

    def __call__(self, arrays: Sequence[NDArray[np.integer]]) -> list[Staged]:
        """Copy integer arrays to the device as int32.

        The caller makes sure that the previous transfer has run (`Fence`).
        """
        places, end = [], 0
        for array in arrays:
            places.append((end, end + len(array)))
            end += -(-len(array) // _ALIGN) * _ALIGN
        if end > len(self._numbers):
            assert not self._is_fixed, "graphs read these addresses"
            self._grow(max(end, 2 * len(self._numbers)))
        for array, place in zip(arrays, places, strict=True):
            self._numbers[slice(*place)] = array
        host, device = self._cut(0, end)
        device.copy_(host, non_blocking=True)
        return [self._cut(*place) for place in places]

    def _grow(self, capacity: int) -> None:
        host = torch.zeros(capacity, dtype=torch.int32, pin_memory=self._place.type == "cuda")
        device = torch.zeros(capacity, dtype=torch.int32, device=self._place)
        self._numbers = host.numpy()
        # Views take longer to make than the copy, and steps of one shape have nearly all the same.
        self._cut = lru_cache(1024)(lambda start, end: Staged(host[start:end], device[start:end]))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: events, captures and some kernels go to its stream.

    Each thread has its own current device, which is the first GPU by default.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def send(values: ArrayLike, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy numbers to the device without waiting.

    `torch.tensor(values, device=...)` and an index that is a list would wait until a GPU has done
    all its earlier work.
    """
    on_host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


class Fence:
    """Lets the host wait until a GPU has passed a point; on a CPU it never waits."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Set the point behind all that is enqueued now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait for the last recorded point."""
        if self._event is not None:
            self._event.synchronize()


class StepUploads:
    """A backend's transfers of index arrays, one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._fence = device, Fence(device)
        self._growing = Upload(device)
        self._fixed: Upload | None = None

    def allocate_fixed(self, int32s: int) -> None:
        """Make room, once, for the arrays of a step that CUDA graphs read."""
        self._fixed = self._fixed or Upload(self._device, int32s)

    @contextmanager
    def stage(self, arrays: Sequence[NDArray[np.integer]], fixed: bool) -> Iterator[list[Staged]]:
        """Copy a step's arrays to the device; inside, enqueue other copies from pinned buffers.

        Args:
            fixed: copy to the addresses that `allocate_fixed` has made.
        """
        upload = self._fixed if fixed else self._growing
        assert upload is not None, "allocate_fixed() first"
        self._fence.wait()  # until the step before no longer reads the pinned buffers
        try:
            yield upload(arrays)
        finally:
            self._fence.record()


class Fetch:
    """Tensors on their way to the host.

    Reading them waits once, until the device has come to this point, not for later work.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        # To pinned memory, unless they are there.
        self._on_host = [t if t.is_cpu else t.to("cpu", non_blocking=True) for t in tensors]
        self._fence = Fence(tensors[0].device)
        self._fence.record()

    def read(self) -> list[list[Any]]:
        """The numbers of each tensor, once they have arrived."""
        self._fence.wait()
        return [tensor.tolist() for tensor in self._on_host]
