"""Times a decode step and the first token of a hit against the limits of the device."""

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
    prefill_graph,
    random_llama,
    random_tokens,
    run_all,
)
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report, Row, figure
from radixcache.runtime.engine.engine import Engine

DECODE_AIM = 1.25
"""Wanted time of decode steps of up to 64 rows, in multiples of the floor."""

HIT_AIM, HIT_AIM_SECONDS = 1.15, 0.0015
"""Wanted time to the first token of a hit: multiples of the floor, plus seconds."""


def run(place: Place, report: Report) -> None:
    report.measure("copy", _copy, place)
    report.measure("matrix product", _matmul, place)
    free_memory()
    model, sizes = random_llama(place, place.sizes.big), place.sizes
    batches, lengths = sizes.decode_batches, sizes.cached
    for cached, page_size in [*((n, 16) for n in lengths), (lengths[len(lengths) // 2], 1)]:
        name = f"TTFT, {cached} cached, page {page_size}"
        report.measure(name, _ttft, place, model, cached, page_size)
    for batch, page_size in [*((batch, 16) for batch in batches), (batches[-2], 1)]:
        name = f"decode, batch {batch}, page {page_size}"
        report.measure(name, _decode, place, model, batch, page_size)


def _copy(place: Place) -> Iterator[Row]:
    """Copy by a kernel: a graph runs `copy_` as a slower memcpy (2,434 of 3,018 GB/s, H100)."""
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
    """A whole step of the engine against the time to read the weights and the KV once."""
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
        limit = DECODE_AIM if batch <= 64 else None
        yield figure(where, seconds / floor, "x floor", limit, note=note)
        replay = place.replay_seconds(last_graph(engine))
        note = f"graph {replay * 1e3:.2f} ms"
        yield figure(f"{where}: device alone", replay / floor, "x floor", note=note)
        yield figure(f"{where}: overhead of the engine", (seconds - replay) * 1e6, "µs a step")


@contextmanager
def document_questions(
    place: Place, model: PreTrainedModel, cached: int, page_size: int = 16
) -> Iterator[tuple[Engine, Callable[[int], float]]]:
    """An engine, and a function that asks n new tokens about one document; returns seconds."""
    sizes, rng = place.sizes, np.random.default_rng(cached)
    room = 20 * sizes.repeat * sum(sizes.questions)
    with engine_on(
        place, model, num_tokens=2 * cached + room, page_size=page_size,
        max_num_batched_tokens=sizes.chunk, max_num_seqs=8,
    ) as engine:  # fmt: skip
        document = random_tokens(rng, engine, cached)

        def ask(count: int) -> float:
            prompt = np.concatenate([document, random_tokens(rng, engine, count)])
            start = time.perf_counter()
            run_all(engine, [prompt], 1)
            return time.perf_counter() - start

        ask(sizes.questions[0])  # the first, cold: later calls are warmed up
        yield engine, ask


def _ttft(place: Place, model: PreTrainedModel, cached: int, page_size: int) -> Iterator[Row]:
    """Time the first token of questions about a cached document, against its floor and cold."""
    with document_questions(place, model, cached, page_size) as (engine, ask):
        if (cached, page_size) == (place.sizes.cached[0], 16):
            yield from _captured(place, engine)
        engine.cache.reset()
        cold = ask(place.sizes.questions[0])
        for question in place.sizes.questions:
            ask(question)  # captures a graph, if there is none yet
            hits = sorted(ask(question) for _ in range(2 * place.sizes.repeat + 1))
            hit = hits[len(hits) // 2]
            floor = floor_seconds(place, model, cached + question, engine.model.bytes_per_token)
            where = f"TTFT of {question} tokens on {cached} cached, page {page_size}"
            note = f"floor {floor * 1e3:.2f} ms, {hits[0] * 1e3:.2f} to {hits[-1] * 1e3:.2f} ms"
            if (replay := prefill_graph(engine, question)) is not None:
                note += f", device alone {place.replay_seconds(replay) * 1e3:.2f} ms"
            limit = (HIT_AIM * floor + HIT_AIM_SECONDS) * 1e3
            yield figure(where, hit * 1e3, "ms", limit, note=note)
        where = f"TTFT of {cached} tokens, page {page_size}, nothing cached"
        yield figure(where, cold * 1e3, "ms", note=f"{cold / hit:.1f} times the last hit")


def _captured(place: Place, engine: Engine) -> Iterator[Row]:
    free_memory()
    free, start = torch.cuda.mem_get_info(place.device)[0], time.perf_counter()
    engine.capture_graphs()
    seconds = time.perf_counter() - start
    free_memory()
    taken = (free - torch.cuda.mem_get_info(place.device)[0]) / 2**20
    yield figure("capturing all graphs of 8 sequences", seconds, "s", note=f"{taken:.0f} MiB")


def floor_seconds(place: Place, model: PreTrainedModel, tokens: int, token_bytes: int) -> float:
    """The least time of a step: reading the weights, and the KV of `tokens`, once.

    With so few new tokens, arithmetic takes less time than that on every GPU.
    """
    if not place.bandwidth:
        raise NotRun("the bandwidth was not measured")
    every: Any = model
    embedding, head = every.get_input_embeddings().weight, every.get_output_embeddings().weight
    # A step reads only rows of the embedding.
    read = [w for w in model.parameters() if w is not embedding or w is head]
    weights = sum(w.numel() * w.element_size() for w in read)
    return (weights + tokens * token_bytes) / place.bandwidth
