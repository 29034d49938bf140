"""The whole check on a simulated GPU, over the tests' stand-in for FlashInfer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from radixcache.bench.gpu.layers import NARROW
from radixcache.bench.gpu.place import Place, Sizes, llama
from radixcache.bench.gpu.triton import WIDE
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.choice import make_flashinfer
from radixcache.kernels.torch_backend import TorchBackend
from radixcache.runtime.engine import model_runner
from radixcache.runtime.engine.worker import Worker
from radixcache.runtime.model import cuda_graphs
from tests.helpers.simulated_cuda import CUDA, Device
from tests.kernels.gpu import simulated_gpu

_TINY = llama(256, 64, 64, 2, 4, 2, 16, 1024)
SMALL = Sizes(
    repeat=1,
    copy_bytes=1 << 20,
    matmul=128,
    head_dims=(16,),
    shrink=32,
    far_elements=1 << 14,
    other_dtypes=(),
    small=_TINY,
    stem=70,
    answer=3,
    big=_TINY,
    decode_batches=(1, 3),
    decode_context=40,
    steps=2,
    cached=(64,),
    questions=(8, 20, 40),
    chunk=128,
    served=_TINY,
    served_answer=3,
    clients=2,
    requests=4,
    heads=((4, 2), (2, 1)),
    head_dim=16,
    rows=(4,),
    shared=(32, 64),
    own=8,
    experts=(8, 2, 64, 32),
    beyond_l2=1 << 12,
)


@contextmanager
def rehearsal_place(out: Path) -> Iterator[Place]:
    """A place there; whatever it replaces is as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if freezes := not gc.get_freeze_count():  # pytest's process has frozen what it imported
        gc.freeze()  # what is imported: memory is tidied up after each of many engines
    try:
        with (
            simulated_gpu() as gpu,
            patch.object(model_runner, "MIN_SAVED", 1),
            patch.object(cuda_graphs, "batch_sizes", _three_sizes),
            patch.object(Worker, "_run", _simulating(gpu.device)),
        ):

            def stand_for_triton(*args: Any) -> AttentionBackend:  # which takes any head
                return (
                    TorchBackend(CUDA) if args[2][0] in (WIDE, NARROW) else make_flashinfer(*args)
                )

            yield Place(CUDA, torch.float32, SMALL, out, True, stand_for_triton)
    finally:
        torch.set_num_threads(threads)
        if freezes:
            gc.unfreeze()


def _simulating(device: Device) -> Callable[[Worker], None]:
    """Torch's modes are a thread's own: the engine's thread enters it, too."""
    run = Worker._run

    def simulate(worker: Worker) -> None:
        with device:
            run(worker)

    return simulate


def _three_sizes(largest: int) -> list[int]:
    """Of graphs: there are up to eleven, each of which is captured operation by operation."""
    return sorted({1, min(4, largest), largest})
