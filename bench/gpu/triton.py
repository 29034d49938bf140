"""Attention in Triton, for layers and GPUs that FlashInfer has no kernels for: does it run for each
kind of layer, and how far is it from FlashInfer at decodes?
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from radixcache.bench.gpu.environment import LAYERS
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report, Row, figure
from radixcache.bench.gpu.steps import layers_of_pages, make_batch
from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.kernels.choice import try_out

WIDE = LayerKind(16, 2, 512, 512, 512**-0.5)
"""Gemma 4's, which FlashInfer does not have everywhere."""

CONTEXT = 4096


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    for kind in [*dict.fromkeys(k for kinds in LAYERS.values() for k in kinds), WIDE]:
        name = f"{kind.query_heads}/{kind.kv_heads} x {kind.head_dim}, window {kind.window}"
        report.check(f"{name}, softcap {kind.softcap}", _try, place, kind)
    for rows in sizes.decode_batches:
        report.measure(f"decode, {rows} rows", _decode, place, rows)


def _backend(place: Place, kind: LayerKind) -> AttentionBackend:
    if place.triton is None:
        raise NotRun("Triton does not run here")
    return place.triton(place.device, place.dtype, [kind])


def _try(place: Place, kind: LayerKind) -> None:
    try_out(_backend(place, kind), place.device, place.dtype, [kind])
    torch.cuda.synchronize()


@torch.inference_mode()
def _decode(place: Place, rows: int) -> Row:
    """One token for each row, in many layers, planned."""
    sizes = place.sizes
    heads, context = sizes.heads[0], CONTEXT // sizes.shrink
    kind = LayerKind(*heads, sizes.head_dim, sizes.head_dim, sizes.head_dim**-0.5)
    batch = make_batch(np.random.default_rng(rows), [(1, context)] * rows, 16)
    inputs = [place.randn(rows, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1])]
    layers = layers_of_pages(place, batch, heads[1])
    seconds = []
    for backend in (_backend(place, kind), place.make_backend(kind)):
        backend.allocate_fixed(rows, len(batch.kv_indices) + rows)
        backend.plan_fixed(batch)
        works = [partial(backend.run, *inputs, *pages, scale=kind.scale) for pages in layers]
        seconds.append(place.gpu_seconds(works, sizes.repeat))
    ours, theirs = (1e6 * one for one in seconds)
    note = f"{ours:.1f} against {theirs:.1f} µs a layer, {context} tokens each"
    return figure(f"Triton over FlashInfer, decode of {rows} rows", ours / theirs, "x", note=note)
