"""Checks attention in Triton, which serves where FlashInfer has no kernels: that it runs for each
kind of layer, and how fast its decodes are against FlashInfer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from radixcache.bench.gpu.layers import LAYERS, try_layer
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report, Row, figure
from radixcache.bench.gpu.steps import Way, seconds_of_decodes
from radixcache.kernels.attention import AttentionBackend, LayerKind

WIDE = LayerKind(16, 2, 512, 512, 512**-0.5)
"""Gemma 4's wide heads, for which FlashInfer has no kernels on some GPUs."""

CONTEXT = 4096


def run(place: Place, report: Report) -> None:
    for rows in place.sizes.decode_batches:
        report.measure(f"decode, {rows} rows", _decode, place, rows)
    make = partial(backend, place)
    for kind in [*dict.fromkeys(k for kinds in LAYERS.values() for k in kinds), WIDE]:
        name = f"{kind.query_heads}/{kind.kv_heads} x {kind.head_dim}, window {kind.window}"
        report.check(f"{name}, softcap {kind.softcap}", try_layer, place, make, place.dtype, kind)


def backend(place: Place, kind: LayerKind, dtype: torch.dtype | None = None) -> AttentionBackend:
    return place.make_triton(place.device, dtype or place.dtype, [kind])


def _decode(place: Place, rows: int) -> Iterator[Row]:
    context = CONTEXT // place.sizes.shrink
    ways: list[Way] = [(partial(backend, place), True), (place.make_backend, True)]
    found = seconds_of_decodes(place, place.sizes.heads[0], [(1, context)] * rows, 0, ways)
    ours, theirs = (1e6 * seconds for seconds in found)
    note = f"{ours:.1f} against {theirs:.1f} µs a layer, {context} tokens each"
    yield figure(f"Triton over FlashInfer, decode of {rows} rows", ours / theirs, "x", note=note)
