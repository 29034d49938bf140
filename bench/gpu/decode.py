"""A decode step of the whole engine against reading the weights and the KV once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from radixcache.base import Tokens
from radixcache.bench.gpu.floors import floor_seconds, flops, weight_bytes
from radixcache.bench.gpu.models import engine_on, greedy, random_tokens, remember
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report
from radixcache.bench.gpu.where import kernels, phases, tell_phases
from radixcache.runtime.engine.engine import Engine

AIM = 1.3
"""Times the floor, at batch sizes of 64 and less."""


def run(place: Place, report: Report, model: PreTrainedModel) -> None:
    for batch in place.sizes.decode_batches:
        report.measure(f"decode, batch {batch}", partial(_step, place, report, model, batch, 16))
    batch = place.sizes.decode_batches[-2]
    report.measure(f"decode, batch {batch}, page 1", partial(_step, place, report, model, batch, 1))


def _step(
    place: Place, report: Report, model: PreTrainedModel, batch: int, page_size: int
) -> Iterator[Figure]:
    sizes, rng = place.sizes, np.random.default_rng(batch)
    context = sizes.decode_context
    with engine_on(
        place, model, num_tokens=batch * (context + 256), page_size=page_size, max_num_seqs=batch
    ) as engine:
        prompts = [random_tokens(rng, engine, context) for _ in range(batch)]
        seconds, seen = decode_steps(place, engine, prompts)
        replay_seconds = graph_seconds(place, engine)
        kv_bytes = batch * context * engine.model.bytes_per_token
        floor = floor_seconds(
            report, weight_bytes(model) + kv_bytes, batch * flops(model, 1, context)
        )

        def explain() -> list[str]:
            return [*tell_phases(seen), *kernels(engine.step)]

        where = f"decode, batch {batch} x {context}, page {page_size}"
        limit = AIM if batch <= 64 else None
        note = f"step {seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms"
        yield Figure(where, seconds / floor, "x floor", limit, note=note, explain=explain)
        yield Figure(
            f"{where}: device alone", replay_seconds / floor, "x floor",
            note=f"graph {replay_seconds * 1e3:.2f} ms",
        )  # fmt: skip
        yield Figure(
            f"{where}: overhead of the engine", (seconds - replay_seconds) * 1e6, "µs a step",
            note=", ".join(tell_phases(seen)),
        )  # fmt: skip


def decode_steps(
    place: Place, engine: Engine, prompts: list[Tokens]
) -> tuple[float, dict[str, list[float]]]:
    """Median seconds of a step that decodes all prompts, whose KV is taken as computed."""
    for prompt in prompts:
        remember(engine, prompt[:-1])
    steps = place.sizes.steps
    for prompt in prompts:
        engine.add_request(prompt, greedy(2 * steps + 40))
    for _ in range(8):  # until all are admitted
        engine.step()
        if len(engine.scheduler.running) == len(prompts):
            break
    else:
        raise RuntimeError(f"{len(engine.scheduler.running)} of {len(prompts)} prompts decode")
    for _ in range(3):  # the first one captures the graph
        engine.step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - start)
    with phases(engine) as seen:  # apart from the steps above: timing costs a little
        for _ in range(steps):
            engine.step()
    return statistics.median(taken), seen


def graph_seconds(place: Place, engine: Engine) -> float:
    """Seconds of the last captured graph on the device; it repeats the last step."""
    assert engine._graphs is not None and engine._graphs._replays, "no step ran in a graph"
    replay = list(engine._graphs._replays.values())[-1]
    assert replay is not None, "no graph could be captured"
    return place.replay_seconds(replay)
