"""Where the check runs: an NVIDIA GPU, or in a rehearsal a pretended one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.bench.gpu.sizes import FULL, Sizes
from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.runtime.model import decode_graphs

Work = Callable[[], Any]


@dataclass
class Place:
    """A device, how to run and time things there, and how big they are.

    Attributes:
        backend: the module that holds `FlashInferBackend`.
        flashinfer: the package that it uses, or the stand-in.
        planted: give every backend a wrong page, to show that the checks see it.
    """

    device: torch.device
    dtype: torch.dtype
    backend: ModuleType
    flashinfer: ModuleType
    sizes: Sizes
    planted: bool = False

    def make_backend(self, *kinds: LayerKind) -> AttentionBackend:
        backend: AttentionBackend = self.backend.FlashInferBackend(self.device, self.dtype, kinds)
        return backend

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device).mul_(scale)

    def host(self, values: Sequence[int] | NDArray[np.integer]) -> torch.Tensor:
        """An int32 array on the host that the device can copy without waiting."""
        return torch.from_numpy(np.asarray(values, dtype=np.int32).copy()).pin_memory()

    def capture(self, work: Work) -> Work:
        """A replay of `work`, from memory of its own."""
        return decode_graphs._Capture(self.device)(work)

    def wall_seconds(self, work: Work, repeat: int = 5) -> float:
        """Median seconds of `work`, from the call until the device is idle."""
        taken = []
        for _ in range(repeat + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def gpu_seconds(self, works: Sequence[Work], repeat: int = 7) -> float:
        """Seconds of one work on the device alone, as a median; the host's launches do not count.

        All works are captured into one graph. Let them touch different memory, more than the L2
        cache together, as a model's layers do.
        """

        def all_works() -> torch.Tensor:
            for work in works:
                work()
            return torch.zeros(1, device=self.device)

        return self.replay_seconds(self.capture(all_works), repeat) / len(works)

    def replay_seconds(self, replay: Work, repeat: int = 7) -> float:
        """Median seconds of `replay` on the device."""
        taken = []
        for _ in range(repeat + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
        return statistics.median(taken[2:])


def gpu_place() -> Place:
    """The first GPU. Raises ImportError without FlashInfer, RuntimeError without CUDA."""
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is visible; `--rehearse` runs without one")
    import flashinfer

    from radixcache.kernels import flashinfer_backend

    torch.backends.cuda.matmul.allow_tf32 = False  # the references are float32
    torch.backends.cuda.enable_cudnn_sdp(False)  # in transformers: it makes a plan for every shape
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(device, torch.bfloat16, flashinfer_backend, flashinfer, FULL)
