"""The whole check on a pretended GPU, over the tests' stand-in for FlashInfer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from radixcache.bench.gpu.place import SMALL, Place
from radixcache.bench.gpu.triton import WIDE
from radixcache.kernels import cascade
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.torch_backend import TorchBackend
from radixcache.runtime.engine import engine as engine_module
from radixcache.runtime.engine.worker import Worker
from radixcache.runtime.model import cuda_graphs
from tests.kernels.gpu import pretend_gpu
from tests.pretend_cuda import CUDA, Device


@contextmanager
def rehearsal_place(out: Path) -> Iterator[Place]:
    """A place there; whatever it replaces is as before afterwards."""
    threads = torch.get_num_threads()
    group = partial(cascade.group_by_prefix, min_rows=cascade.MIN_ROWS, min_tokens=32)
    torch.set_num_threads(1)
    if freezes := not gc.get_freeze_count():  # pytest's process has frozen what it imported
        gc.freeze()  # what is imported: memory is tidied up after each of many engines
    try:
        with (
            pretend_gpu() as gpu,
            patch.object(engine_module, "group_by_prefix", group),
            patch.object(cuda_graphs, "batch_sizes", _three_sizes),
            patch.object(Worker, "_run", _pretending(gpu.device)),
        ):
            make = gpu.backend.FlashInferBackend

            def stand_for_triton(*args: Any) -> AttentionBackend:  # which takes any head
                return TorchBackend(CUDA) if args[2] == [WIDE] else make(*args)

            kernels = gpu.flashinfer, gpu.backend
            yield Place(CUDA, torch.float32, SMALL, out, kernels, stand_for_triton)
    finally:
        torch.set_num_threads(threads)
        if freezes:
            gc.unfreeze()


def _pretending(device: Device) -> Callable[[Worker], None]:
    """Torch's modes are a thread's own: the engine's thread enters it, too."""
    run = Worker._run

    def pretend(worker: Worker) -> None:
        with device:
            run(worker)

    return pretend


def _three_sizes(largest: int) -> list[int]:
    """Of graphs: there are up to eleven, each of which is captured operation by operation."""
    return sorted({1, min(4, largest), largest})
