"""What a decode step costs the host: the engine and FlashInfer's own Python over kernels that do
nothing. Needs FlashInfer's Python, and no GPU:

    PYTHONPATH=.venv-gpu/flashinfer python -m radixcache.bench.gpu.host

Launching graphs and copies to a device are not in it. Times are medians, of one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig

from radixcache import PagePool, RadixCache
from radixcache.bench.gpu.models import begin_decoding, random_tokens, seconds_of_steps
from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduler import Scheduler
from radixcache.runtime.model import cuda_graphs
from radixcache.runtime.model.paged_model import PagedModel

CPU = torch.device("cpu")
KIND = LayerKind(32, 8, 128, 128, 128**-0.5)
CONTEXT, PAGE_SIZE, STEPS = 1024, 16, 100


class NoLayers(PagedModel):
    """A model whose forward pass is nothing but its logits."""

    layers_by = "nothing"

    def _logits(self, pool: Any, ids: Any, positions: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), self.vocab_size)


@contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """FlashInfer's wrappers run; what they would call does not, and memory is not pinned."""
    from flashinfer import cascade, decode, page, prefill

    nothing = lambda *_: None  # noqa: E731
    module = SimpleNamespace(
        plan=lambda *_: [0] * 15, run=nothing, paged_run=nothing, ragged_run=nothing,
        append_paged_kv_cache=nothing, merge_state_in_place=nothing,
    )  # fmt: skip

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="none")
    with ExitStack() as stack:
        for owner, name, value in (
            (prefill, "get_batch_prefill_module", lambda *_: module),
            (decode, "get_batch_prefill_module", lambda *_: module),
            (decode, "get_batch_decode_module", lambda *_: module),
            (page, "get_page_module", lambda: module),
            (cascade, "get_cascade_module", lambda: module),
            (torch, "empty", unpinned(torch.empty)),
            (torch, "zeros", unpinned(torch.zeros)),
            (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "graph_pool_handle", nothing),
            (torch.cuda, "Stream", nothing),
            (cuda_graphs._Capture, "__call__", _compute_once),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _compute_once(_: Any, compute: Callable[[], Any]) -> Callable[[], Any]:
    result = compute()
    return lambda: result


def make_engine(rows: int) -> Engine:
    from radixcache.kernels.flashinfer_backend import FlashInferBackend

    attention = FlashInferBackend(CPU, torch.bfloat16, [KIND])
    model = NoLayers(
        "llama", GenerationConfig(), torch.bfloat16, CPU, [KIND], 256, 4096, None, attention
    )
    pages = rows * ((CONTEXT + 3 * STEPS) // PAGE_SIZE + 2)
    cache = RadixCache(PagePool(pages, PAGE_SIZE))
    engine = Engine(model, model.allocate(pages, PAGE_SIZE), cache, Scheduler(cache, 8192, rows))
    engine._runs_ahead = True
    return engine


def microseconds(function: Callable[[], object], count: int = 300) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print(" rows  step us  plan us")
    with kernels_that_do_nothing(), torch.inference_mode():
        for rows in (1, 16, 64, 256):
            engine = make_engine(rows)
            prompts = [random_tokens(rng, engine, CONTEXT) for _ in range(rows)]
            begin_decoding(engine, prompts, 2 * STEPS)
            step = statistics.median(seconds_of_steps(engine, STEPS)) * 1e6
            lens = [CONTEXT + 16] * rows
            tables = np.split(np.arange(rows * 65, dtype=np.int32), rows)
            ids = np.zeros(rows, np.int32)

            def plan(
                attention: Any = engine.model.attention, tables: Any = tables, lens: Any = lens,
                ids: Any = ids,
            ) -> None:  # fmt: skip
                batch = PagedBatch.of(tables, [1] * len(lens), lens, PAGE_SIZE)
                attention.plan_fixed(batch, ids, batch.positions(), ids)

            print(f"{rows:5,} {step:8,.0f} {microseconds(plan):8,.0f}", flush=True)
        attention = engine.model.attention
        attention.plan(PagedBatch.of([np.arange(65, dtype=np.int32)], [4], [1040], PAGE_SIZE))
        query = torch.zeros(4, KIND.query_heads, KIND.head_dim, dtype=torch.bfloat16)
        key = torch.zeros(4, KIND.kv_heads, KIND.head_dim, dtype=torch.bfloat16)
        pages = torch.zeros(66, PAGE_SIZE, *key.shape[1:], dtype=torch.bfloat16)
        layer = microseconds(
            lambda: attention.run(query, key, key, pages, pages, scale=KIND.scale), 2000
        )
        print(f"an eager layer's append and attention: {layer:.1f} us")


if __name__ == "__main__":
    main()
