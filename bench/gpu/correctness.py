"""Checks every path of the FlashInfer backend against plain torch in float32, on random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report
from radixcache.bench.gpu.steps import (
    TOLERANCE,
    Lens,
    Step,
    attend,
    compare,
    error,
    make_step,
    reference,
    with_wrong_page,
)
from radixcache.kernels.attention import LayerInputs, LayerKind, LayerPages
from radixcache.runtime.model.cuda_graphs import Shape, pad, prefill_shapes
from radixcache.runtime.model.kv_pool import KVPool, LayerShape

GROUPS = {1: (8, 8), 4: (8, 2), 8: (8, 1)}
"""Query and KV heads by the number of query heads that share one."""

SHAPES: dict[str, tuple[Lens, int]] = {
    "decode": ([(1, 700), (1, 0), (1, 33), (1, 1500)], 0),
    "suffix": ([(64, 2048), (16, 777), (200, 1000)], 0),
    "fresh": ([(300, 0), (17, 0), (64, 0)], 0),
    "mixed": ([(1, 900), (1, 31), (40, 512), (129, 0)], 0),
    "cascade": ([(1, 1024 + n) for n in (3, 0, 170, 30, 6, 512)], 1024),
    "cascade, mixed": ([*((1, 1024 + n) for n in (3, 0, 170, 30)), (20, 100)], 1024),
}
"""(New, cached) tokens of each sequence, and how many tokens the decodes share."""


def run(place: Place, report: Report) -> None:
    shapes = {name: shrunk(place, *shape) for name, shape in SHAPES.items()}
    for page_size, dim, group in product((1, 16), place.sizes.head_dims, GROUPS):
        make = partial(make_step, place, page_size=page_size, heads=GROUPS[group], dim=dim)
        where = f"page {page_size}, head_dim {dim}, GQA {group}"
        for name, (lens, share) in shapes.items():
            report.check(f"{name}: {where}", _eager, place, partial(make, 7, lens, share=share))
    make = partial(make_step, place, heads=(8, 2), dim=place.sizes.head_dims[-1], page_size=16)
    report.check("self-test: a wrong page is seen", _wrong_page, place, make)
    for rows in (5, 256 // min(place.sizes.shrink, 8)):
        report.check(f"cascade in a graph, {rows} rows, 32/8 heads", _graph, place, rows)
    dim = place.sizes.head_dims[-1]
    kind = LayerKind(32, 8, dim, dim, dim**-0.5)
    for shape in prefill_shapes(place.make_backend(kind), 63):
        report.check(
            f"with prefill in a graph, {shape.tokens} tokens of {shape.sequences}",
            _prefill_graph,
            place,
            shape,
        )
    report.check("pages beyond 2^31 elements", _far_pages, place, make)
    report.check("copy-on-write", _copies, place, 64)
    report.check("copy-on-write beyond 2^31 elements", _copies, place, None)
    for rule in ({"window": 256}, {"softcap": 20.0}, {"window": 256, "softcap": 20.0}):
        for heads in ((8, 2), (8, 4)):  # with tensor cores, and without
            lens, _ = shrunk(place, [(1, 700), (64, 900)], 0)
            with_rule = partial(make, 5, lens, heads=heads, **rule)
            name = " and ".join(rule)
            report.check(f"{name}, {heads[0]}/{heads[1]} heads", _eager, place, with_rule)


def shrunk(place: Place, lens: Lens, share: int) -> tuple[Lens, int]:
    """Shorter lengths for a rehearsal; shared prefixes stay whole pages."""
    by = place.sizes.shrink
    return [(min(new, max(2, new // by)), cached // by) for new, cached in lens], share // by


def _eager(place: Place, make: Callable[[], Step]) -> str:
    step = make()
    return compare(attend(place.make_backend(step.kind), step), reference(place, step))


def _wrong_page(place: Place, make: Callable[..., Step]) -> str:
    step = make(3, [(1, 70), (5, 30)])
    found = attend(place.make_backend(step.kind), step, with_wrong_page(step.batch))[0]
    worst = error(found, reference(place, step)[0])
    assert worst > TOLERANCE, f"a planted error of {worst:.2g} passes for rounding"
    return f"error {worst:.2g}"


def _graph(place: Place, rows: int) -> str:
    """A cascade of as many rows as a graph may have: its results must fit the workspace."""
    by, rng = place.sizes.shrink, np.random.default_rng(4)
    share = 2048 // by
    lens = [[(1, share + int(n)) for n in rng.integers(0, 128 // by, rows)] for _ in range(2)]
    return _replayed(place, lens, share, Shape(rows, rows, True))


def _prefill_graph(place: Place, shape: Shape) -> str:
    """Decodes and chunks, some behind long prefixes, in a padded batch."""
    by, rng = place.sizes.shrink, np.random.default_rng(shape.tokens)
    lens = []
    for count in (1, shape.sequences - 1, shape.sequences // 2):
        cuts = np.sort(rng.choice(np.arange(1, shape.tokens), count, replace=False))
        new = np.sort(np.diff([0, *cuts]))
        cached = rng.choice([0, 40 // by, 700 // by, 9000 // by], count)
        lens.append([(int(n), int(c)) for n, c in zip(new, cached, strict=True)])
    lens = [each if each[-1][0] > 1 else [*each[:-1], (2, 9)] for each in lens]
    return _replayed(place, lens, 0, shape)


@torch.inference_mode()
def _replayed(place: Place, lens: Sequence[Lens], share: int, shape: Shape) -> str:
    """The worst error of steps replayed in one graph, each with other page tables."""
    dim = place.sizes.head_dims[-1]
    make = partial(make_step, place, page_size=16, heads=(32, 8), dim=dim, share=share)
    steps = [make(seed, each) for seed, each in enumerate(lens)]
    backend = place.make_backend(steps[0].kind)
    most = max(len(step.pages.k) for step in steps) + 1
    backend.allocate_fixed(max(shape.sequences, 64), shape.sequences * most + shape.tokens)
    pages = LayerPages(*(side.new_zeros(most, *side.shape[1:]) for side in steps[0].pages))
    query, key, value = (t.new_zeros(shape.tokens, *t.shape[1:]) for t in steps[0].tensors[:3])
    inputs = LayerInputs(query, key, value, pages, steps[0].kind)
    replay, differences = None, []
    for step in steps:
        used = [side[: len(step.pages.k)] for side in pages]
        for to, given in zip([query, key, value, *used], step.tensors, strict=True):
            to[: len(given)].copy_(given)
            to[len(given) :].zero_()
        plan = backend.plan_fixed(pad(step.batch, shape, most - 1))
        if replay is None:
            replay = place.capture(partial(plan.run, inputs))
        out = replay()[: len(step.query)]
        differences.append(compare((out, *used), reference(place, step)))
    return max(differences, key=lambda text: float(text.split()[-1]))


@torch.inference_mode()
def _far_pages(place: Place, make: Callable[..., Step]) -> str:
    """The kernels must multiply page numbers in 64 bits."""
    by = place.sizes.shrink
    step = make(9, [(1, 300 // by), (50, 200 // by)])
    num_pages = place.sizes.far_elements // step.pages.k[0].numel()
    first = num_pages - len(step.pages.k)
    right = reference(place, step)
    far = LayerPages(*(near.new_zeros(num_pages, *near.shape[1:]) for near in step.pages))
    for pages, near in zip(far, step.pages, strict=True):
        pages[first:].copy_(near)
    backend = place.make_backend(step.kind)
    plan = backend.plan(replace(step.batch, kv_indices=step.batch.kv_indices + np.int32(first)))
    out = plan.run(step.inputs(far))
    return compare((out, *(pages[first:] for pages in far)), right)


@torch.inference_mode()
def _copies(place: Place, num_pages: int | None) -> str:
    """`KVPool.copy` in all layers at once, also where a page is both source and target."""
    layers, page_size, heads, dim = 4, 16, 2, place.sizes.head_dims[-1]
    per_page = 2 * layers * page_size * heads * dim
    count = num_pages or place.sizes.far_elements // per_page
    pool = KVPool(
        [LayerShape(heads, dim, dim)] * layers, count, page_size, place.dtype, place.device
    )
    last = count - 1
    copies = [(0, last, 5), (last, 1, 16), (2, 3, 1), (last - 1, last - 2, 9)]
    used = sorted({page for source, target, _ in copies for page in (source, target)})
    for k_pages, v_pages in pool.layers:
        k_pages[used], v_pages[used] = place.randn(2, len(used), page_size, heads, dim)
    before = [[side[used].clone() for side in layer] for layer in pool.layers]
    pool.copy(copies)
    for layer, old in zip(pool.layers, before, strict=True):
        for side, was in zip(layer, old, strict=True):
            expected = was.clone()
            for source, target, slots in copies:
                expected[used.index(target), :slots] = was[used.index(source), :slots]
            assert torch.equal(side[used], expected), "a page is not what was copied to it"
    return f"{count} pages"
