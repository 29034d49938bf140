"""A decode step of the whole engine against reading the weights and the KV once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedModel

from radixcache.bench.gpu.ceilings import floor_seconds
from radixcache.bench.gpu.models import (
    begin_decoding,
    engine_on,
    last_graph,
    random_llama,
    random_tokens,
    seconds_of_steps,
)
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report, Row, figure

AIM = 1.3
"""Times the floor, at batch sizes of 64 and less."""


def run(place: Place, report: Report) -> None:
    model, batches = random_llama(place, place.sizes.big), place.sizes.decode_batches
    for batch, page_size in [*((batch, 16) for batch in batches), (batches[-2], 1)]:
        name = f"decode, batch {batch}, page {page_size}"
        report.measure(name, _step, place, model, batch, page_size)


def _step(place: Place, model: PreTrainedModel, batch: int, page_size: int) -> Iterator[Row]:
    context, steps = place.sizes.decode_context, place.sizes.steps
    rng = np.random.default_rng(batch)
    with engine_on(
        place, model, num_tokens=batch * (context + 256), page_size=page_size, max_num_seqs=batch
    ) as engine:
        begin_decoding(engine, [random_tokens(rng, engine, context) for _ in range(batch)], steps)
        seconds = statistics.median(seconds_of_steps(engine, steps))
        floor = floor_seconds(place, model, batch, 1, context, engine.model.bytes_per_token)
        where = f"decode, batch {batch} x {context}, page {page_size}"
        note = f"step {seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms"
        limit = AIM if batch <= 64 else None
        yield figure(where, seconds / floor, "x floor", limit, note=note)
        replay = place.replay_seconds(last_graph(engine))
        note = f"graph {replay * 1e3:.2f} ms"
        yield figure(f"{where}: device alone", replay / floor, "x floor", note=note)
        yield figure(f"{where}: overhead of the engine", (seconds - replay) * 1e6, "µs a step")
