"""Measures cascade attention (a shared prefix read once) against flat attention: from how many rows
and tokens it pays, and whether the threshold in `kernels.cascade` is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report, Row, figure
from radixcache.bench.gpu.steps import seconds_of_decodes
from radixcache.kernels.cascade import MIN_ROWS, MIN_SAVED

AIM = 3.0
"""Least speed-up wanted with 64 rows and 8192 shared tokens (3.12 on an H100, whose L2 cache helps
flat attention, too)."""

NEVER_SLOWER = 0.97
"""Least speed-up wanted wherever the threshold turns the cascade on."""


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    for heads in sizes.heads:
        ratios: dict[tuple[int, int], float] = {}
        for rows, shared in product(sizes.rows, sizes.shared):
            name = f"attention, {heads} heads, {rows} rows, {shared} shared"
            report.measure(name, _attention, place, heads, rows, shared, ratios)
        for rows in sizes.rows:
            pays = [shared for shared in sizes.shared if ratios.get((rows, shared), 0) >= 1]
            pays_from = f"from {min(pays)} tokens" if pays else "never"
            report.note(f"{heads[0]}/{heads[1]} heads, {rows} rows: it pays", pays_from)


def _attention(
    place: Place,
    heads: tuple[int, int],
    rows: int,
    shared: int,
    ratios: dict[tuple[int, int], float],
) -> Iterator[Row]:
    lens = [(1, shared + place.sizes.own)] * rows
    ways = [(place.make_backend, False), (place.make_backend, True)]
    flat, levels = seconds_of_decodes(place, heads, lens, shared, ways)
    ratios[rows, shared] = flat / levels
    saved = (rows - 1) * shared * heads[1] * 2 * place.sizes.head_dim * place.dtype.itemsize
    limit = NEVER_SLOWER if rows >= MIN_ROWS and saved >= MIN_SAVED else None
    if (rows, shared) == (64, 8192) and heads[1] > 1:
        limit = AIM
    where = f"flat over cascade, {heads[0]}/{heads[1]} heads, {rows} rows, {shared} shared"
    note = f"{flat * 1e6:.1f} against {levels * 1e6:.1f} µs a layer"
    yield figure(where, flat / levels, "x", at_least=limit, note=note)
