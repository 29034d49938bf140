"""Time to the first token of a question about a cached document, against its floor and cold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from radixcache.bench.gpu.floors import floor_seconds, flops, weight_bytes
from radixcache.bench.gpu.models import engine_on, finish, greedy, random_tokens
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report
from radixcache.bench.gpu.where import kernels, phases, tell_phases

AIM = 1.3
"""Times the floor, plus `AIM_SECONDS`."""

AIM_SECONDS = 0.005


def run(place: Place, report: Report, model: PreTrainedModel) -> None:
    for cached in place.sizes.cached:
        report.measure(f"TTFT, {cached} cached", partial(_ttft, place, report, model, cached, 16))
    cached = place.sizes.cached[len(place.sizes.cached) // 2]
    report.measure(
        f"TTFT, {cached} cached, page 1", partial(_ttft, place, report, model, cached, 1)
    )


def _ttft(
    place: Place, report: Report, model: PreTrainedModel, cached: int, page_size: int
) -> Iterator[Figure]:
    sizes, rng = place.sizes, np.random.default_rng(cached)
    question = sizes.question
    with engine_on(
        place, model, num_tokens=3 * cached + 64 * question, page_size=page_size,
        max_num_batched_tokens=sizes.chunk, max_num_seqs=8,
    ) as engine:  # fmt: skip
        document = random_tokens(rng, engine, cached)

        def ask() -> float:
            prompt = np.concatenate([document, random_tokens(rng, engine, question)])
            start = time.perf_counter()
            engine.add_request(prompt, greedy(1))
            finish(engine)
            return time.perf_counter() - start

        ask()  # cold, and the first: what follows is warmed up
        engine.cache.reset()
        cold = ask()
        hits = sorted(ask() for _ in range(2 * sizes.repeat + 1))
        hit = hits[len(hits) // 2]
        read = weight_bytes(model) + (cached + question) * engine.model.bytes_per_token
        floor = floor_seconds(report, read, flops(model, question, cached))

        def explain() -> list[str]:
            with phases(engine) as seen:
                ask()
            return [*tell_phases(seen), *kernels(ask)]

        where = f"TTFT of {question} tokens on {cached} cached, page {page_size}"
        yield Figure(
            where, hit * 1e3, "ms", (AIM * floor + AIM_SECONDS) * 1e3,
            note=f"floor {floor * 1e3:.2f} ms, {hits[0] * 1e3:.2f} to {hits[-1] * 1e3:.2f} ms",
            explain=explain,
        )  # fmt: skip
        yield Figure(
            f"{where}: cold over cached", cold / hit, "x", note=f"cold {cold * 1e3:.1f} ms"
        )
