"""Shows where the device's time goes: the longest kernels, and traces for a viewer.

CUPTI stays attached to a profiled process and slows it from then on: so this is the last section,
and it reports shares of time only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from transformers import PreTrainedModel

from radixcache.bench.gpu.models import decoding, random_llama
from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.report import Report, Row, figure
from radixcache.bench.gpu.speed import document_questions

LONGEST = 12
"""How many kernels a row lists."""


def run(place: Place, report: Report) -> None:
    model = random_llama(place, place.sizes.big)
    for batch in place.sizes.decode_batches:
        report.measure(f"decode step of {batch}", _decode, place, model, batch)
    for cached in place.sizes.cached:
        report.measure(f"question on {cached} cached", _question, place, model, cached)


def _decode(place: Place, model: PreTrainedModel, batch: int) -> Iterator[Row]:
    with decoding(place, model, batch, steps=4) as engine:
        yield _profile(place, f"decode step of {batch}", engine.step)


def _question(place: Place, model: PreTrainedModel, cached: int) -> Iterator[Row]:
    with document_questions(place, model, cached) as (_, ask):
        question = partial(ask, place.sizes.questions[-2])
        question()
        yield _profile(place, f"question on {cached} cached", question)


def _profile(place: Place, name: str, work: Work) -> Row:
    """The device's busy share in one run of `work`, and its longest kernels; saves the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as found:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    found.export_chrome_trace(str(place.out / f"{name.replace(' ', '_')}.json.gz"))
    rows = [
        (row.self_device_time_total, row.count, row.key)
        for row in found.key_averages()
        if str(row.device_type).endswith("CUDA") and row.self_device_time_total > 0
    ]
    rows.sort(reverse=True)
    busy = sum(row[0] for row in rows)  # µs
    lines = [f"{t / 1e3:8.3f} ms  {calls:5} x  {key[:100]}" for t, calls, key in rows[:LONGEST]]
    note = f"{busy / 1e3:.2f} of {wall * 1e3:.2f} ms, {sum(row[1] for row in rows)} launches"
    return figure(f"{name}: device busy", busy / wall / 1e4, "%", note=note, lines=lines)
