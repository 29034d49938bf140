"""The whole check on a CPU over the tests' stand-in for FlashInfer: no time there means anything.

A graph is a computation that is run again without planning anew, into the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.sizes import SMALL
from radixcache.kernels import cascade
from radixcache.runtime import decode_graphs
from radixcache.runtime import engine as engine_module
from radixcache.runtime import model as model_module


class _Replay:
    """Stands in for `decode_graphs._Capture`."""

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def __call__(self, compute: Work) -> Work:
        from tests.kernels import fake_flashinfer

        owner = getattr(getattr(compute, "func", None), "__self__", None)
        if isinstance(owner, decode_graphs.DecodeGraphs):
            fake_flashinfer.SPARE_PAGES.add(owner._pool.spare_page)
        result = compute().clone()

        @torch.inference_mode()
        def replay() -> Any:
            return result.copy_(compute())

        return replay


@contextmanager
def rehearsal_place() -> Iterator[Place]:
    """A place on the CPU; whatever it replaces is as before afterwards."""
    from tests.kernels import fake_flashinfer
    from tests.kernels.stand_in import load_backend

    backend = load_backend()
    backend._WORKSPACE = 16 << 20  # type: ignore[attr-defined]  # zeroing more takes long
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(fake_flashinfer.reset)
        fake_flashinfer.reset()
        fake_flashinfer.ALLOW_FLOAT32 = fake_flashinfer.ALLOW_ANY_HEAD_DIM = True
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        group = partial(cascade.group_by_prefix, min_rows=cascade.MIN_ROWS, min_tokens=32)
        for owner, name, value in (
            (decode_graphs, "_Capture", _Replay),
            (engine_module, "group_by_prefix", group),
            (model_module, "choose_backend", backend.FlashInferBackend),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield Place(torch.device("cpu"), torch.float32, backend, fake_flashinfer, _Replay(), SMALL)
