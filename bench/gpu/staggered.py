"""Decodes as they are in service: begun at different times, so that their reservations end out of
phase, after prompts of different lengths, and with tokens that are sampled.

A step overlaps if it was launched before the tokens of the one before it were read.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedModel

from radixcache import SamplingParams
from radixcache.bench.gpu.models import (
    begin_decoding,
    engine_on,
    random_llama,
    random_tokens,
    seconds_of_steps,
)
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report

AIM = 95
"""Percent of the steps that overlap."""

SAMPLED = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
}


def run(place: Place, report: Report) -> None:
    model = random_llama(place, place.sizes.big)
    for batch in place.sizes.decode_batches[-2:]:
        greedy: list[float] = []
        for name, params in SAMPLED.items():
            where = f"{batch} staggered rows, {name}"
            report.measure(where, _steps, place, model, batch, where, params, greedy)


def _steps(
    place: Place, model: PreTrainedModel, batch: int, where: str, params: SamplingParams,
    greedy: list[float],
) -> Iterator[Figure]:  # fmt: skip
    """`greedy` gets the seconds of the first of several, which the others are compared with."""
    context, steps, period = place.sizes.decode_context, 4 * place.sizes.steps, place.sizes.period
    rng = np.random.default_rng(batch)
    lengths = [context + 37 * row % period for row in range(batch)]
    with engine_on(
        place, model, num_tokens=batch * (context + steps + 3 * period + 128), max_num_seqs=batch
    ) as engine:
        prompts = [random_tokens(rng, engine, length) for length in lengths]
        begin_decoding(engine, prompts, steps, params, over=period)
        taken, overlapped = [], 0
        for _ in range(steps):
            taken += seconds_of_steps(engine, 1)
            overlapped += engine._ahead is not None
    seconds = statistics.mean(taken)
    greedy.append(seconds)
    note = f"median {statistics.median(taken) * 1e3:.2f} ms, {seconds / greedy[0]:.2f} x greedy"
    yield Figure(f"{where}: mean step", seconds * 1e3, "ms", note=note)
    yield Figure(f"{where}: steps that overlap", 100 * overlapped / steps, "%", at_least=AIM)
