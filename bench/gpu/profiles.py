"""Where the device's time goes: the longest kernels, and traces for a viewer.

CUPTI stays attached to a process that was profiled once and slows what comes after: so this is a
section of its own, and what it times is told as a share only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from radixcache.bench.gpu.cascade import attention_works
from radixcache.bench.gpu.models import begin_decoding, engine_on, random_llama, random_tokens
from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.report import Figure, Report
from radixcache.bench.gpu.ttft import asking

LONGEST = 12
"""Kernels that are named."""


def run(place: Place, report: Report) -> None:
    model, sizes = random_llama(place, place.sizes.big), place.sizes
    for batch in sizes.decode_batches:
        report.measure(f"decode step of {batch}", _decode, place, model, batch)
    for cached in (sizes.cached[0], sizes.cached[-1]):
        report.measure(f"question on {cached} cached", _question, place, model, cached)
    report.measure("attention", _attention, place)


def _decode(place: Place, model: PreTrainedModel, batch: int) -> Figure:
    context, rng = place.sizes.decode_context, np.random.default_rng(batch)
    with engine_on(place, model, num_tokens=batch * (context + 256), max_num_seqs=batch) as engine:
        prompts = [random_tokens(rng, engine, context) for _ in range(batch)]
        begin_decoding(engine, prompts, 4)
        return profile(place, f"decode step of {batch}", engine.step)


def _question(place: Place, model: PreTrainedModel, cached: int) -> Figure:
    with asking(place, model, cached) as (_, ask):
        ask()
        ask()
        return profile(place, f"question on {cached} cached", ask)


def _attention(place: Place) -> Iterator[Figure]:
    sizes = place.sizes
    rows, shared = sizes.rows[-1], sizes.shared[-1]
    for name, works in attention_works(place, sizes.heads[0], rows, shared, 16).items():
        yield profile(place, f"attention {name}, {rows} rows on {shared}", partial(_all, works))


def _all(works: list[Work]) -> None:
    with torch.inference_mode():
        for work in works:
            work()


def profile(place: Place, name: str, work: Work) -> Figure:
    """The device's busy share in one run of `work`, and its longest kernels; keeps the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as found:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    traces = place.out / "traces"
    traces.mkdir(exist_ok=True)
    found.export_chrome_trace(str(traces / f"{name.replace(' ', '_')}.json.gz"))
    rows = [
        (row.self_device_time_total, row.count, row.key)
        for row in found.key_averages()
        if str(row.device_type).endswith("CUDA") and row.self_device_time_total > 0
    ]
    rows.sort(reverse=True)
    busy = sum(row[0] for row in rows)  # µs
    lines = [f"{t / 1e3:8.3f} ms  {calls:5} x  {key[:100]}" for t, calls, key in rows[:LONGEST]]
    launches = sum(row[1] for row in rows)
    note = f"{busy / 1e3:.2f} of {wall * 1e3:.2f} ms, {launches} launches"
    return Figure(f"{name}: device busy", busy / wall / 1e4, "%", note=note, lines=lines)
