"""A decode step and the first token of a hit: what runs, and its time against a GPU's limits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from radixcache.runtime.engine.engine import Engine
from radixcache.tokens import Tokens
from tests.gpu.conftest import Row
from tests.gpu.models import engine_on, free_memory, greedy, random_llama, random_tokens, run_all
from tests.gpu.place import Place, Work

DECODE_AIM = 1.25
"""Wanted time of decode steps of up to 64 rows, in multiples of the floor."""

HIT_AIM, HIT_AIM_SECONDS = 1.15, 0.0015
"""Wanted time to the first token of a hit: multiples of the floor, plus seconds."""

QUESTIONS = (16, 64, 256)


@pytest.fixture(scope="module")
def bandwidth(place: Place) -> float:
    """Bytes a second that a copy by a kernel reads and writes: a graph runs `copy_` as a slower
    memcpy (2,434 of 3,018 GB/s, H100)."""
    source = place.randn((4 << 30) // place.shrink**3)
    target = torch.empty_like(source)
    return 2 * source.nbytes / place.gpu_seconds([partial(torch.add, source, 1, out=target)])


@pytest.fixture(scope="module")
def model(place: Place) -> Iterator[LlamaForCausalLM]:
    free_memory()
    yield random_llama(place, place.served)
    free_memory()


def floor_seconds(model: LlamaForCausalLM, kv_bytes: int, bandwidth: float) -> float:
    """The least time of a step: reading the weights and KV once. With so few new tokens, arithmetic
    takes less time than that on every GPU."""
    embedding = model.get_input_embeddings().weight  # of which a step reads only rows
    read = [weight for weight in model.parameters() if weight is not embedding]
    return (sum(weight.nbytes for weight in read) + kv_bytes) / bandwidth


def replay_of(engine: Engine, tokens: int, only_decodes: bool) -> Work | None:
    """The graph that runs a step of so many tokens; None if it runs kernel by kernel."""
    replays = engine.runner.graphs._replays if engine.runner.graphs else {}
    fits = [s for s in replays if s.tokens >= tokens and s.only_decodes == only_decodes]
    return replays[min(fits)] if fits else None


def test_a_matrix_product_and_a_copy(place: Place, bandwidth: float, row: Row) -> None:
    size = 8192 // place.shrink
    a, b = place.randn(size, size), place.randn(size, size)
    out = torch.empty_like(a)
    rate = 2 * size**3 / place.gpu_seconds([lambda: torch.mm(a, b, out=out)] * 3)
    row("copy, read and written", bandwidth / 1e9, "GB/s")
    row(f"matrix product, {place.dtype}, {size} cubed", rate / 1e12, "TFLOP/s")
    near = 1e-4 if place.dtype == torch.float32 else 0.5
    torch.testing.assert_close(out[:1].float(), a[:1].float() @ b.float(), atol=near, rtol=1e-2)


@pytest.mark.parametrize(("rows", "page_size"), [(1, 16), (16, 16), (64, 16), (256, 16), (64, 1)])
def test_decodes_run_in_a_graph(
    place: Place, model: LlamaForCausalLM, bandwidth: float, row: Row, rows: int, page_size: int
) -> None:
    """A whole step of the engine against the time to read weights and KV once."""
    rows, context, steps = place.short(rows), place.short(1024), place.short(15, least=2)
    rng = np.random.default_rng(rows)
    with engine_on(
        place, model, num_tokens=rows * (context + 256), page_size=page_size, max_num_seqs=rows
    ) as engine:
        for _ in range(rows):
            prompt = random_tokens(rng, engine, context)
            remember(engine, prompt[:-1])
            engine.add_request(prompt, greedy(steps + 16))
        for _ in range(8):  # the first ones admit them, and capture the graph
            engine.step()
        assert len(engine.scheduler.running) == rows
        taken = [seconds_of(engine.step) for _ in range(steps)]
        seconds = statistics.median(taken)
        kv_bytes = rows * (context + 1) * engine.model.bytes_per_token
        floor = floor_seconds(model, kv_bytes, bandwidth)
        where = f"decode, {rows} x {context}, page {page_size}"
        limit = DECODE_AIM if rows <= 64 else None
        note = f"step {seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms"
        row(where, seconds / floor, "x floor", limit, note)
        replay = replay_of(engine, rows, only_decodes=True)
        assert (replay is not None) == (engine.runner.graphs is not None)
        if replay is not None:
            device = place.replay_seconds(replay)
            row(f"{where}: device alone", device / floor, "x floor", None, f"{device * 1e3:.2f} ms")
            row(f"{where}: overhead of the engine", (seconds - device) * 1e6, "µs a step")


def remember(engine: Engine, tokens: Tokens) -> None:
    """Let the cache hold `tokens` as if they had been computed: the noise in the pool is theirs."""
    lease = engine.cache.acquire(tokens)
    engine.cache.reserve(lease, len(tokens))
    engine.cache.publish(lease, tokens[lease.num_tokens :])
    lease.take_copies()
    engine.cache.commit()
    engine.cache.release(lease)


def seconds_of(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("cached", "page_size"), [(4096, 16), (16_384, 16), (32_768, 16), (16_384, 1)]
)
def test_a_hit_computes_the_question_alone(
    place: Place, model: LlamaForCausalLM, bandwidth: float, row: Row, cached: int, page_size: int
) -> None:
    """The first token of a question on a cached document, against its floor and without a hit."""
    cached, rng = place.short(cached), np.random.default_rng(cached)
    room = 2 * cached + 50 * sum(QUESTIONS)
    with engine_on(
        place, model, num_tokens=room, page_size=page_size, max_num_seqs=8,
        max_num_batched_tokens=place.short(8192),
    ) as engine:  # fmt: skip
        document = random_tokens(rng, engine, cached)

        def ask(count: int) -> tuple[float, int]:
            """Seconds, and how many tokens were found."""
            prompt = np.concatenate([document, random_tokens(rng, engine, count)])
            before = engine.cache.stats.hit_tokens
            seconds = seconds_of(lambda: run_all(engine, [prompt], 1))
            return seconds, engine.cache.stats.hit_tokens - before

        ask(16)  # the first, cold: later calls are warmed up
        engine.cache.reset()
        cold, found = ask(16)
        assert found == 0
        row(f"{cached} tokens, page {page_size}, nothing cached", cold * 1e3, "ms")
        for question in QUESTIONS:
            ask(question)  # captures a graph, if there is none yet
            hits = [ask(question) for _ in range(place.short(15, least=3))]
            assert all(cached <= found < cached + question for _, found in hits)
            times = sorted(seconds for seconds, _ in hits)
            hit = times[len(times) // 2]
            kv_bytes = (cached + question) * engine.model.bytes_per_token
            floor = floor_seconds(model, kv_bytes, bandwidth)
            note = f"floor {floor * 1e3:.2f} ms, {times[0] * 1e3:.2f} to {times[-1] * 1e3:.2f} ms"
            if (replay := replay_of(engine, question, only_decodes=False)) is not None:
                note += f", device alone {place.replay_seconds(replay) * 1e3:.2f} ms"
            limit = (HIT_AIM * floor + HIT_AIM_SECONDS) * 1e3
            row(f"{question} tokens on {cached}, page {page_size}", hit * 1e3, "ms", limit, note)


def test_all_graphs_are_captured(place: Place, model: LlamaForCausalLM, row: Row) -> None:
    with engine_on(place, model, num_tokens=4096, max_num_seqs=8) as engine:
        free_memory()
        free = torch.cuda.mem_get_info(place.device)[0]
        seconds = seconds_of(engine.capture_graphs)
        free_memory()
        taken = (free - torch.cuda.mem_get_info(place.device)[0]) / 2**20
        graphs = engine.runner.graphs
        assert graphs is None or (graphs._replays and None not in graphs._replays.values())
        row("capturing all graphs of 8 sequences", seconds, "s", None, f"{taken:.0f} MiB")
