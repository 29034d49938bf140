"""The whole check on a pretended GPU, over the tests' stand-in for FlashInfer."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from radixcache import LLM
from radixcache.bench.gpu import llm, peers
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun
from radixcache.bench.gpu.sizes import SMALL
from radixcache.kernels import cascade
from radixcache.runtime import cli
from radixcache.runtime.engine import engine as engine_module
from radixcache.runtime.engine.worker import Worker
from radixcache.runtime.model import cuda_graphs as decode_graphs
from tests.kernels.gpu import pretend_gpu
from tests.pretend_cuda import CUDA, Device
from tests.runtime.server.live import live


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
            patch.object(decode_graphs, "batch_sizes", _three_sizes),
            patch.object(peers, "_peer", _not_here),
            patch.object(Worker, "_run", _pretending(gpu.device)),
            patch.object(llm, "generate_apart", _generate_here),
            patch.object(llm, "serve_apart", _serve_here),
        ):
            kernels = (gpu.flashinfer, gpu.backend)
            yield Place(CUDA, torch.float32, SMALL, out, kernels)
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


def _not_here(*_: object) -> None:
    raise NotRun("its thread pretends nothing")


def _generate_here(options: Sequence[str]) -> str:
    """Other processes pretend nothing, and take seconds to start."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        assert cli.main([*options]) == 0
    return out.getvalue()


@contextmanager
def _serve_here(options: Sequence[str]) -> Iterator[str]:
    """On the CPU, since the engine has a thread of its own."""
    given = vars(cli._parser().parse_args([*options]))
    on_cpu = LLM(
        device="cpu", dtype=given["dtype"], kv_cache_memory_bytes=given["kv_cache_memory_bytes"]
    )
    with live(on_cpu) as server:
        yield server.url
