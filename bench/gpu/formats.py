"""Checks and times what came after the last run on a GPU: pages of fp8 and int8, windows that are
kept apart, experts in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from radixcache.bench.gpu.correctness import SHAPES, shrunk
from radixcache.bench.gpu.families import check_family
from radixcache.bench.gpu.layers import NARROW
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report, Row, figure
from radixcache.bench.gpu.steps import (
    Lens,
    compare,
    make_step,
    reference,
    seconds_of_decodes,
    stored_in,
)
from radixcache.bench.gpu.triton import backend
from radixcache.kernels.attention import AttentionBackend, LayerPages
from radixcache.kernels.kv_format import BLOCK, FP8, decode, encode
from radixcache.runtime.model.description import MLP, Experts
from radixcache.runtime.model.operations import experts
from radixcache.runtime.model.operations.experts import GroupedExperts
from radixcache.runtime.model.operations.fused_experts import FusedExperts

_ROWS = (1, 16, 64, 1024)
_CONTEXT = 4096


def run(place: Place, report: Report) -> None:
    ways: list[tuple[str, torch.dtype, Callable[..., AttentionBackend]]] = [
        ("fp8, FlashInfer", FP8, partial(place.make_backend, kv_dtype=FP8)),
        ("int8, Triton", torch.int8, partial(backend, place)),
    ]
    for name, dtype, make in ways:
        for shape in ("decode", "suffix", "fresh", "mixed"):
            lens, _ = shrunk(place, *SHAPES[shape])
            report.check(f"pages of {name}: {shape}", _pages, place, lens, dtype, make)
        if dtype == FP8 or place.sizes.head_dim % BLOCK == 0:
            report.measure(f"decode over {name}", _decode, place, name, dtype, make)
    name = "olmo3, windows kept apart = plain transformers"
    report.check(name, check_family, place, "olmo3", True)
    for rows in _ROWS:
        report.measure(f"experts of {rows} rows", _experts, place, rows)


@torch.inference_mode()
def _pages(place: Place, lens: Lens, dtype: torch.dtype, make: Callable[..., Any]) -> str:
    """The reference attends over what the pages hold, once it is read again."""
    step = make_step(place, 5, lens, page_size=16, heads=(8, 2), dim=NARROW.head_dim)
    held = [decode(encode(t, dtype), place.dtype) for t in step.tensors[1:]]
    right = reference(place, replace(step, key=held[0], value=held[1], pages=LayerPages(*held[2:])))
    pages = stored_in(step.pages, dtype)
    out = make(step.kind).plan(step.batch).run(step.inputs(pages))
    return compare((out, *(decode(side, place.dtype) for side in pages)), right)


def _decode(place: Place, name: str, dtype: torch.dtype, make: Callable[..., Any]) -> Iterator[Row]:
    plain = place.make_backend if dtype == FP8 else make
    for rows in place.sizes.decode_batches:
        lens = [(1, _CONTEXT // place.sizes.shrink)] * rows
        ways = [(make, False), (plain, False)]
        found = seconds_of_decodes(place, place.sizes.heads[0], lens, 0, ways, (dtype, place.dtype))
        ours, theirs = (1e6 * seconds for seconds in found)
        note = f"{ours:.1f} against {theirs:.1f} µs a layer"
        where = f"decode over {name}, {rows} rows, over {place.dtype} pages"
        yield figure(where, ours / theirs, "x", note=note)


@torch.inference_mode()
def _experts(place: Place, rows: int) -> Iterator[Row]:
    """A layer's experts, by torch's grouped products, by Triton's, and by FlashInfer's kernel where
    it is built."""
    count, active, hidden, inner = place.sizes.experts
    spec = Experts(count, active, MLP(inner))
    weights: dict[str, Any] = {"router": place.randn(count, hidden, scale=hidden**-0.5)}
    for name, shape in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        scale = shape[1] ** -0.5
        weights[f"experts.{name}"] = [*place.randn(count, *shape, scale=scale)]
    inputs = [place.randn(rows, hidden) for _ in range(3)]

    def seconds(layer: GroupedExperts) -> float:
        return place.gpu_seconds([partial(layer, x) for x in inputs], place.sizes.repeat)

    plain = GroupedExperts(spec, weights, place.dtype)
    with patch.object(plain, "product", None):
        grouped = seconds(plain)
    name = f"experts of {rows} rows, {active} of {count}, {hidden} x {inner}"
    yield figure(f"{name}: torch's grouped products", 1e6 * grouped, "µs")
    if plain.product is not None:
        with patch.object(experts, "FEW", math.inf):
            by_triton = seconds(plain)
        note = f"{1e6 * by_triton:.0f} µs"
        yield figure(f"{name}: Triton's over them", by_triton / grouped, "x", note=note)
    if not place.with_flashinfer:
        raise NotRun("FlashInfer does not run here")
    try:
        kernel = FusedExperts(spec, weights, place.dtype)
        kernel.compare()
        fused = seconds(kernel)
    except RuntimeError as error:
        if "is not" not in str(error):  # else it is not built, or not for this GPU
            raise
        raise NotRun(str(error)) from error
    note = f"{1e6 * fused:.0f} µs"
    yield figure(f"{name}: FlashInfer's kernel over them", fused / grouped, "x", note=note)
