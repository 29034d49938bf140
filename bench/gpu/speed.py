"""How fast it is: a decode step and the first token of a hit, against what the device can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from radixcache.bench.gpu.models import (
    decoding,
    engine_on,
    free_memory,
    last_graph,
    random_llama,
    random_tokens,
    run_all,
)
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report, Row, figure
from radixcache.runtime.engine.engine import Engine

AIM = 1.3
"""Times the floor: decode steps of 64 and less, and a hit's TTFT, plus `AIM_SECONDS`."""

AIM_SECONDS = 0.005


def run(place: Place, report: Report) -> None:
    report.measure("copy", _copy, place)
    report.measure("matrix product", _matmul, place)
    free_memory()
    model, sizes = random_llama(place, place.sizes.big), place.sizes
    batches, lengths = sizes.decode_batches, sizes.cached
    for batch, page_size in [*((batch, 16) for batch in batches), (batches[-2], 1)]:
        name = f"decode, batch {batch}, page {page_size}"
        report.measure(name, _decode, place, model, batch, page_size)
    for cached, page_size in [*((n, 16) for n in lengths), (lengths[len(lengths) // 2], 1)]:
        name = f"TTFT, {cached} cached, page {page_size}"
        report.measure(name, _ttft, place, model, cached, page_size)


def _copy(place: Place) -> Iterator[Row]:
    """By a kernel: a copy that is captured in a graph is none, and slower (2,434 of 3,018 GB/s,
    H100)."""
    source = place.randn(place.sizes.copy_bytes // place.dtype.itemsize)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / place.gpu_seconds([lambda: torch.add(source, 1, out=target)])
    place.bandwidth = rate
    yield figure("device-to-device copy", rate / 1e9, "GB/s", note="bytes read and written")


def _matmul(place: Place) -> Iterator[Row]:
    size = place.sizes.matmul
    a, b = place.randn(size, size), place.randn(size, size)
    out = torch.empty_like(a)
    rate = 2 * size**3 / place.gpu_seconds([lambda: torch.mm(a, b, out=out)] * 3)
    note = f"{place.dtype}, {size} cubed, random data"
    yield figure("matrix product", rate / 1e12, "TFLOP/s", note=note)


def _decode(place: Place, model: PreTrainedModel, batch: int, page_size: int) -> Iterator[Row]:
    """A step of the whole engine against reading the weights and the KV once."""
    context, steps = place.sizes.decode_context, place.sizes.steps
    with decoding(place, model, batch, steps, page_size) as engine:
        taken = []
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - start)
        seconds = statistics.median(taken)
        tokens = batch * (context + 1)
        floor = floor_seconds(place, model, tokens, engine.model.bytes_per_token)
        where = f"decode, batch {batch} x {context}, page {page_size}"
        note = f"step {seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms"
        limit = AIM if batch <= 64 else None
        yield figure(where, seconds / floor, "x floor", limit, note=note)
        replay = place.replay_seconds(last_graph(engine))
        note = f"graph {replay * 1e3:.2f} ms"
        yield figure(f"{where}: device alone", replay / floor, "x floor", note=note)
        yield figure(f"{where}: overhead of the engine", (seconds - replay) * 1e6, "µs a step")


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
    """The first token of a question about a cached document, against its floor and cold."""
    question = place.sizes.question
    with asking(place, model, cached, page_size) as (engine, ask):
        engine.cache.reset()
        cold = ask()
        hits = sorted(ask() for _ in range(2 * place.sizes.repeat + 1))
        hit = hits[len(hits) // 2]
        floor = floor_seconds(place, model, cached + question, engine.model.bytes_per_token)
        where = f"TTFT of {question} tokens on {cached} cached, page {page_size}"
        note = f"floor {floor * 1e3:.2f} ms, {hits[0] * 1e3:.2f} to {hits[-1] * 1e3:.2f} ms"
        limit = (AIM * floor + AIM_SECONDS) * 1e3
        yield figure(where, hit * 1e3, "ms", limit, note=note)
        note = f"cold {cold * 1e3:.1f} ms"
        yield figure(f"{where}: cold over cached", cold / hit, "x", note=note)


def floor_seconds(place: Place, model: PreTrainedModel, tokens: int, token_bytes: int) -> float:
    """The least time of a step: that of reading the weights, and the KV of `tokens`, once.

    With so few new tokens operations take less, on every GPU that there is.
    """
    if not place.bandwidth:
        raise NotRun("the bandwidth was not measured")
    every: Any = model
    embedding, head = every.get_input_embeddings().weight, every.get_output_embeddings().weight
    # Of the embedding a step takes rows.
    read = [w for w in model.parameters() if w is not embedding or w is head]
    weights = sum(w.numel() * w.element_size() for w in read)
    return (weights + tokens * token_bytes) / place.bandwidth
