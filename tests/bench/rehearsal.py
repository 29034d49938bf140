"""The whole check on a pretended GPU, over the tests' stand-in for FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from radixcache.bench.gpu import peers
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun
from radixcache.bench.gpu.sizes import SMALL
from radixcache.kernels import cascade
from radixcache.runtime.engine import engine as engine_module
from tests.kernels.stand_in import pretend_gpu
from tests.pretend_cuda import CUDA


@contextmanager
def rehearsal_place() -> Iterator[Place]:
    """A place there; whatever it replaces is as before afterwards."""
    threads = torch.get_num_threads()
    group = partial(cascade.group_by_prefix, min_rows=cascade.MIN_ROWS, min_tokens=32)
    torch.set_num_threads(1)
    try:
        with (
            pretend_gpu() as gpu,
            patch.object(engine_module, "group_by_prefix", group),
            patch.object(peers, "_peer", _not_here),
        ):
            yield Place(CUDA, torch.float32, gpu.backend, gpu.flashinfer, SMALL)
    finally:
        torch.set_num_threads(threads)


def _not_here(*_: object) -> None:
    raise NotRun("its thread pretends nothing")
