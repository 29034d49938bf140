"""Attention over shared prefixes in two levels against flat, alone and in the engine.

Says from how many rows and tokens it pays, and whether the thresholds in `kernels.cascade` stand.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from radixcache.bench.gpu.models import (
    begin_decoding,
    engine_on,
    last_graph,
    random_llama,
    random_tokens,
    seconds_of_steps,
)
from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.report import Figure, Report
from radixcache.bench.gpu.steps import layers_of_pages, make_batch
from radixcache.kernels import cascade
from radixcache.kernels.attention import LayerKind
from radixcache.runtime.engine import engine as engine_module

AIM = 5.0
"""Times faster than flat with 64 rows and 8192 shared tokens."""

NEVER_SLOWER = 0.97
"""Flat over cascade, wherever the thresholds turn the cascade on."""

Points = dict[tuple[int, int], float]
"""Flat over cascade, by rows and shared tokens."""


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    for heads in sizes.heads:
        points: Points = {}
        for rows, shared in product(sizes.rows, sizes.shared):
            name = f"attention, {heads} heads, {rows} rows, {shared} shared"
            report.measure(name, _attention, place, heads, rows, shared, 16, points)
        _conclude(report, f"{heads[0]}/{heads[1]} heads", points)
    widest = sizes.rows[-1], sizes.shared[-1]
    report.measure("attention, page 1", _attention, place, sizes.heads[0], *widest, 1, {})
    model = random_llama(place, sizes.big)
    for shared in sizes.shared_in_engine:
        report.measure(f"engine, {shared} shared", _engine, place, model, shared)


@torch.inference_mode()
def attention_works(
    place: Place, heads: tuple[int, int], rows: int, shared: int, page_size: int
) -> dict[str, list[Work]]:
    """Attention of decodes in many layers, planned: flat, and in two levels."""
    sizes = place.sizes
    kind = LayerKind(*heads, sizes.head_dim, sizes.head_dim, sizes.head_dim**-0.5)
    lens = [(1, shared + sizes.own)] * rows
    batch = make_batch(np.random.default_rng(rows), lens, page_size, shared)
    inputs = [place.randn(rows, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1])]
    layers = layers_of_pages(place, batch, heads[1])
    works: dict[str, list[Work]] = {}
    for name, one in (("flat", replace(batch, shared=())), ("in two levels", batch)):
        backend = place.make_backend(kind)
        backend.allocate_fixed(rows, len(batch.kv_indices) + rows)
        backend.plan_fixed(one)
        works[name] = [partial(backend.run, *inputs, *pages, scale=kind.scale) for pages in layers]
    return works


@torch.inference_mode()
def _attention(
    place: Place, heads: tuple[int, int], rows: int, shared: int, page_size: int, points: Points
) -> Figure:
    works = attention_works(place, heads, rows, shared, page_size)
    flat, levels = (place.gpu_seconds(each, place.sizes.repeat) for each in works.values())
    points[rows, shared] = flat / levels
    turned_on = rows >= cascade.MIN_ROWS and shared >= cascade.MIN_TOKENS
    limit = NEVER_SLOWER if turned_on else None
    if (rows, shared) == (64, 8192) and heads[1] > 1:
        limit = AIM
    where = f"{heads[0]}/{heads[1]} heads, {rows} rows, {shared} shared, page {page_size}"
    note = f"{flat * 1e6:.1f} against {levels * 1e6:.1f} µs a layer"
    return Figure(f"flat over cascade, {where}", flat / levels, "x", at_least=limit, note=note)


def _conclude(report: Report, where: str, points: Points) -> None:
    """The break-even, and whether the thresholds are where they should be."""
    told = []
    for rows in sorted({rows for rows, _ in points}):
        pays = [t for (r, t), ratio in sorted(points.items()) if r == rows and ratio >= 1]
        told.append(f"{rows} rows: {f'from {min(pays)} tokens' if pays else 'never'}")
    report.tell(f"break-even, {where}", "; ".join(told) or "nothing was measured")
    on = {
        point: ratio
        for point, ratio in points.items()
        if point[0] >= cascade.MIN_ROWS and point[1] >= cascade.MIN_TOKENS
    }
    if not on:
        report.tell(f"thresholds, {where}", "no point above them was measured")
        return
    slower = sorted(point for point, ratio in on.items() if ratio < NEVER_SLOWER)
    missed = sorted(p for p, ratio in points.items() if p not in on and ratio > 1.1)
    report.tell(
        f"MIN_ROWS = {cascade.MIN_ROWS}, MIN_TOKENS = {cascade.MIN_TOKENS}, {where}",
        ("stand" if not slower else f"too low: slower than flat at {slower}")
        + (f"; could be lower: more than 10 % is lost at {missed}" if missed else "")
        + " (rows, tokens)",
    )


def _engine(place: Place, model: PreTrainedModel, shared: int) -> Iterator[Figure]:
    """A decode step of the engine; flat by never finding a group."""
    sizes, rows = place.sizes, place.sizes.shared_rows
    seconds, device = [], []
    group = vars(engine_module)["group_by_prefix"]
    for find in (_no_groups, group):
        rng = np.random.default_rng(3)
        with (
            patch.object(engine_module, "group_by_prefix", find),
            engine_on(
                place, model, num_tokens=shared + rows * (sizes.own + 256), max_num_seqs=rows
            ) as engine,
        ):
            stem = random_tokens(rng, engine, shared)
            tails = [random_tokens(rng, engine, sizes.own) for _ in range(rows)]
            prompts = [np.concatenate([stem, tail]) for tail in tails]
            begin_decoding(engine, prompts, sizes.steps)
            seconds.append(statistics.median(seconds_of_steps(engine, sizes.steps)))
            device.append(place.replay_seconds(last_graph(engine)))
            if find is group and shared >= cascade.MIN_TOKENS:
                assert engine._graphs is not None
                assert (rows, True) in engine._graphs._replays, "no step was a cascade"
    for name, (flat, levels) in (("step", seconds), ("device alone", device)):
        where = f"engine, {rows} rows, {shared} shared: flat over cascade, {name}"
        note = f"{flat * 1e3:.2f} against {levels * 1e3:.2f} ms"
        yield Figure(where, flat / levels, "x", note=note)


def _no_groups(tables: Sequence[Any], _: int) -> tuple[list[int], tuple[()]]:
    return list(range(len(tables))), ()
