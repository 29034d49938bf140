"""Attention over a shared prefix in two levels against flat: from how many rows and tokens it pays,
and whether the thresholds in `kernels.cascade` stand.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report, Row, figure
from radixcache.bench.gpu.steps import layers_of_pages, make_batch
from radixcache.kernels.attention import LayerKind
from radixcache.kernels.cascade import MIN_ROWS, MIN_TOKENS

AIM = 5.0
"""Times faster than flat with 64 rows and 8192 shared tokens."""

NEVER_SLOWER = 0.97
"""Flat over cascade, wherever the thresholds turn the cascade on."""


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    for heads in sizes.heads:
        ratios: dict[tuple[int, int], float] = {}
        for rows, shared in product(sizes.rows, sizes.shared):
            name = f"attention, {heads} heads, {rows} rows, {shared} shared"
            report.measure(name, _attention, place, heads, rows, shared, ratios)
        for rows in sizes.rows:
            pays = [shared for shared in sizes.shared if ratios.get((rows, shared), 0) >= 1]
            told = f"from {min(pays)} tokens" if pays else "never"
            report.tell(f"{heads[0]}/{heads[1]} heads, {rows} rows: it pays", told)


@torch.inference_mode()
def _attention(
    place: Place,
    heads: tuple[int, int],
    rows: int,
    shared: int,
    ratios: dict[tuple[int, int], float],
) -> Row:
    """Decodes in many layers, planned: flat over in two levels."""
    sizes = place.sizes
    kind = LayerKind(*heads, sizes.head_dim, sizes.head_dim, sizes.head_dim**-0.5)
    batch = make_batch(np.random.default_rng(rows), [(1, shared + sizes.own)] * rows, 16, shared)
    inputs = [place.randn(rows, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1])]
    layers = layers_of_pages(place, batch, heads[1])
    seconds = []
    for one in (replace(batch, shared=()), batch):
        backend = place.make_backend(kind)
        backend.allocate_fixed(rows, len(batch.kv_indices) + rows)
        backend.plan_fixed(one)
        works = [partial(backend.run, *inputs, *pages, scale=kind.scale) for pages in layers]
        seconds.append(place.gpu_seconds(works, sizes.repeat))
    flat, levels = seconds
    ratios[rows, shared] = flat / levels
    limit = NEVER_SLOWER if rows >= MIN_ROWS and shared >= MIN_TOKENS else None
    if (rows, shared) == (64, 8192) and heads[1] > 1:
        limit = AIM
    where = f"flat over cascade, {heads[0]}/{heads[1]} heads, {rows} rows, {shared} shared"
    note = f"{flat * 1e6:.1f} against {levels * 1e6:.1f} µs a layer"
    return figure(where, flat / levels, "x", at_least=limit, note=note)
