"""Where the check runs: an NVIDIA GPU, or in a rehearsal a pretended one."""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from radixcache.bench.gpu.report import NotRun
from radixcache.bench.gpu.sizes import FULL, Sizes
from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.runtime.model import cuda_graphs

Work = Callable[[], Any]


@dataclass
class Place:
    """A device, how to run and time things there, and how big they are.

    Attributes:
        out: the folder of the results.
        kernels: FlashInfer, or the stand-in, and the module that holds `FlashInferBackend`; None
            where only plain torch runs.
        triton: makes the backend in Triton; None where there is none.
        ceilings: what the device reaches at best: "bytes/s", "flop/s".
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    out: Path
    kernels: tuple[ModuleType, ModuleType] | None
    triton: Callable[..., AttentionBackend] | None = None
    ceilings: dict[str, float] = field(default_factory=dict)

    def make_backend(self, *kinds: LayerKind, dtype: torch.dtype | None = None) -> AttentionBackend:
        if self.kernels is None:
            raise NotRun("FlashInfer does not run here")
        make: Any = vars(self.kernels[1])["FlashInferBackend"]
        backend: AttentionBackend = make(self.device, dtype or self.dtype, kinds)
        return backend

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device).mul_(scale)

    def capture(self, work: Work) -> Work:
        """A replay of `work`, from memory of its own."""
        return cuda_graphs._Capture(self.device)(work)

    def gpu_seconds(self, works: Sequence[Work], repeat: int = 7) -> float:
        """Median seconds of one work on the device alone; the host's launches do not count.

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


def gpu_place(out: Path, with_flashinfer: bool) -> Place:
    torch.backends.cuda.matmul.allow_tf32 = False  # the references are float32
    torch.backends.cuda.enable_cudnn_sdp(False)  # in transformers: it makes a plan for every shape
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = None
    if with_flashinfer:
        with suppress(Exception):  # the section `environment` says what is wrong
            kernels = load_flashinfer()
    else:
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # so nobody can import it
    triton = None
    with suppress(ImportError):
        triton = importlib.import_module("radixcache.kernels.triton_backend").TritonBackend
    return Place(device, torch.bfloat16, FULL, out, kernels, triton)


def load_flashinfer() -> tuple[ModuleType, ModuleType]:
    """FlashInfer, and the module of the backend over it; raises whatever FlashInfer does."""
    import flashinfer

    return flashinfer, importlib.import_module("radixcache.kernels.flashinfer_backend")
