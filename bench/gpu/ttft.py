"""Time to the first token of a question about a cached document, against its floor and cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from transformers import PreTrainedModel

from radixcache.bench.gpu.ceilings import floor_seconds
from radixcache.bench.gpu.models import engine_on, random_llama, random_tokens, run_all
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report, Row, figure
from radixcache.runtime.engine.engine import Engine

AIM = 1.3
"""Times the floor, plus `AIM_SECONDS`."""

AIM_SECONDS = 0.005


def run(place: Place, report: Report) -> None:
    model, lengths = random_llama(place, place.sizes.big), place.sizes.cached
    for cached, page_size in [*((n, 16) for n in lengths), (lengths[len(lengths) // 2], 1)]:
        name = f"TTFT, {cached} cached, page {page_size}"
        report.measure(name, _ttft, place, model, cached, page_size)


@contextmanager
def asking(
    place: Place, model: PreTrainedModel, cached: int, page_size: int = 16
) -> Iterator[tuple[Engine, Callable[[], float]]]:
    """An engine, and what asks it something new about one document, in seconds."""
    sizes, rng = place.sizes, np.random.default_rng(cached)
    with engine_on(
        place, model, num_tokens=3 * cached + 64 * sizes.question, page_size=page_size,
        max_num_batched_tokens=sizes.chunk, max_num_seqs=8,
    ) as engine:  # fmt: skip
        document = random_tokens(rng, engine, cached)

        def ask() -> float:
            prompt = np.concatenate([document, random_tokens(rng, engine, sizes.question)])
            start = time.perf_counter()
            run_all(engine, [prompt], 1)
            return time.perf_counter() - start

        ask()  # cold, and the first: what follows is warmed up
        yield engine, ask


def _ttft(place: Place, model: PreTrainedModel, cached: int, page_size: int) -> Iterator[Row]:
    question = place.sizes.question
    with asking(place, model, cached, page_size) as (engine, ask):
        engine.cache.reset()
        cold = ask()
        hits = sorted(ask() for _ in range(2 * place.sizes.repeat + 1))
        hit = hits[len(hits) // 2]
        floor = floor_seconds(place, model, 1, question, cached, engine.model.bytes_per_token)
        where = f"TTFT of {question} tokens on {cached} cached, page {page_size}"
        note = f"floor {floor * 1e3:.2f} ms, {hits[0] * 1e3:.2f} to {hits[-1] * 1e3:.2f} ms"
        limit = (AIM * floor + AIM_SECONDS) * 1e3
        yield figure(where, hit * 1e3, "ms", limit, note=note)
        note = f"cold {cold * 1e3:.1f} ms"
        yield figure(f"{where}: cold over cached", cold / hit, "x", note=note)
