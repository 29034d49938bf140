"""Every path of the FlashInfer backend on random data against plain torch in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
from radixcache.kernels.attention import PagedBatch
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
"""Lengths, and how many tokens the decodes share."""


def run(place: Place, report: Report) -> None:
    shrunk = {name: _shrunk(place, *shape) for name, shape in SHAPES.items()}
    for page_size in (1, 16):
        for dim in place.sizes.head_dims:
            for group, heads in GROUPS.items():
                make = partial(make_step, place, page_size=page_size, heads=heads, dim=dim)
                where = f"page {page_size}, head_dim {dim}, GQA {group}"
                for name, (lens, share) in shrunk.items():
                    report.check(
                        f"{name}: {where}",
                        partial(_eager, place, partial(make, 7, lens, share=share)),
                    )
                report.check(f"graphs: {where}", partial(_graphs, place, make))
    for name in ("decode", "suffix", "fresh", "cascade"):
        lens, share = shrunk[name]
        report.check(
            f"self-test: a wrong page is seen ({name})",
            partial(_planted, place, lens, share),
        )
    report.check("self-test: a graph replayed on an old plan is seen", partial(_stale, place))
    report.check("cascade in a graph, 256 rows, 32/8 heads", partial(_widest_graph, place))
    report.check("pages beyond 2^31 elements", partial(_far_pages, place))
    report.check("copy-on-write", partial(_copies, place, 64))
    report.check("copy-on-write beyond 2^31 elements", partial(_copies, place, None))
    for name, options in (("window", {"window": 256}), ("softcap", {"softcap": 20.0})):
        _optional(place, report, name, options)


def _shrunk(place: Place, lens: Lens, share: int) -> tuple[Lens, int]:
    """Lengths for a rehearsal; what is shared stays whole pages."""
    by = place.sizes.shrink
    return [(min(new, max(2, new // by)), cached // by) for new, cached in lens], share // by


def _eager(place: Place, make: Callable[[], Step]) -> str:
    step = make()
    backend = place.make_backend(step.kind)
    batch = with_wrong_page(step.batch) if place.planted else step.batch
    return compare(attend(backend, step, batch), reference(place, step))


@torch.inference_mode()
def _graphs(place: Place, make: Callable[..., Step]) -> str:
    """Graphs of two sizes, with a shared prefix and without, replayed in turn on other tables."""
    sizes, share = (3, 8), 1024 // place.sizes.shrink
    probe = make(0, [(1, 5)])
    backend = place.make_backend(probe.kind)
    backend.allocate_fixed(max(sizes), max(sizes) * 4096)
    num_pages = max(sizes) * -(-(share + 402) // probe.batch.page_size) + 64
    pages = [t.new_zeros(num_pages, *t.shape[1:]) for t in (probe.k_pages, probe.v_pages)]
    inputs = {
        size: [t.new_zeros(size, *t.shape[1:]) for t in (probe.query, probe.key, probe.value)]
        for size in sizes
    }
    replays: dict[tuple[int, bool], Callable[[], torch.Tensor]] = {}
    worst = 0.0
    rng = np.random.default_rng(1)
    for turn in range(3 * len(sizes) * 2):
        size, cascade = sizes[turn % 2], turn % 4 >= 2 and sizes[turn % 2] > 4
        lens = [
            (1, share + int(rng.integers(0, 400 // place.sizes.shrink + 1))) for _ in range(size)
        ]
        step = make(100 + turn, lens, share=share if cascade else 0)
        batch = with_wrong_page(step.batch) if place.planted else step.batch
        for static, fresh in zip(pages, (step.k_pages, step.v_pages), strict=True):
            static[: len(fresh)].copy_(fresh)
        for static, fresh in zip(inputs[size], (step.query, step.key, step.value), strict=True):
            static.copy_(fresh)
        backend.plan_fixed(batch)
        key = size, cascade
        if key not in replays:
            work = partial(backend.run, *inputs[size], *pages, scale=step.kind.scale)
            replays[key] = place.capture(work)
        out = replays[key]()
        right = reference(place, step)
        compare((out, *(p[: len(step.k_pages)] for p in pages)), right)
        worst = max(worst, error(out, right[0]))
    return f"error {worst:.1e} in {3 * len(sizes) * 2} replays of {len(replays)} graphs"


def _planted(place: Place, lens: Lens, share: int) -> str:
    step = make_step(
        place, 3, lens, page_size=16 if share % 16 == 0 else 1, heads=(8, 2),
        dim=place.sizes.head_dims[-1], share=share,
    )  # fmt: skip
    backend = place.make_backend(step.kind)
    if (step.batch.query_lens == step.batch.kv_lens).all():  # reads no page: a wrong length, then
        step.value[-1] = step.value[0]
        right = reference(place, step)[0]
        step.value[-1] = 50.0
        found = attend(backend, step)[0]
    else:
        found, right = (
            attend(backend, step, with_wrong_page(step.batch))[0],
            reference(place, step)[0],
        )
    worst = error(found, right)
    assert worst > TOLERANCE, f"a planted error of {worst:.2g} passes for rounding"
    return f"error {worst:.2g}"


@torch.inference_mode()
def _stale(place: Place) -> str:
    make = partial(make_step, place, page_size=16, heads=(8, 2), dim=place.sizes.head_dims[-1])
    steps = [make(seed, [(1, 40 + 8 * seed), (1, 60)]) for seed in (1, 2)]
    backend = place.make_backend(steps[0].kind)
    backend.allocate_fixed(2, 1000)
    backend.plan_fixed(steps[0].batch)
    first, second = steps
    pages = [t.new_zeros(64, *t.shape[1:]) for t in (first.k_pages, first.v_pages)]
    inputs = [t.clone() for t in (first.query, first.key, first.value)]

    def fill(step: Step) -> None:
        for static, fresh in zip(pages, (step.k_pages, step.v_pages), strict=True):
            static[: len(fresh)].copy_(fresh)
        for static, fresh in zip(inputs, (step.query, step.key, step.value), strict=True):
            static.copy_(fresh)

    fill(first)
    replay = place.capture(partial(backend.run, *inputs, *pages, scale=first.kind.scale))
    replay()
    fill(second)
    worst = error(replay(), reference(place, second)[0])
    assert worst > TOLERANCE, f"an old plan passes with an error of {worst:.2g}"
    return f"error {worst:.2g}"


@torch.inference_mode()
def _widest_graph(place: Place) -> str:
    """As many rows as a graph may have: the workspace must hold their partial results."""
    share = 2048 // place.sizes.shrink
    rows = 256 // min(place.sizes.shrink, 8)
    rng = np.random.default_rng(4)
    lens = [(1, share + int(n)) for n in rng.integers(0, 128 // place.sizes.shrink, rows)]
    step = make_step(
        place, 4, lens, page_size=16, heads=(32, 8), dim=place.sizes.head_dims[-1], share=share
    )
    backend = place.make_backend(step.kind)
    backend.allocate_fixed(rows, len(step.batch.kv_indices) + rows)
    pages = step.k_pages.clone(), step.v_pages.clone()
    backend.plan_fixed(step.batch)
    inputs = (step.query, step.key, step.value)
    replay = place.capture(partial(backend.run, *inputs, *pages, scale=step.kind.scale))
    return compare((replay(), *pages), reference(place, step))


@torch.inference_mode()
def _far_pages(place: Place) -> str:
    """The kernels must multiply page numbers in 64 bits."""
    page_size, heads, dim = 16, (8, 2), place.sizes.head_dims[-1]
    lens = [(1, 300 // place.sizes.shrink), (50, 200 // place.sizes.shrink)]
    step = make_step(place, 9, lens, page_size=page_size, heads=heads, dim=dim)
    num_pages = place.sizes.far_elements // (page_size * heads[1] * dim)
    first = num_pages - len(step.k_pages)
    far = [
        torch.zeros(num_pages, page_size, heads[1], dim, dtype=place.dtype, device=place.device)
        for _ in range(2)
    ]
    for pages, near in zip(far, (step.k_pages, step.v_pages), strict=True):
        pages[first:].copy_(near)
    batch = PagedBatch(
        step.batch.qo_indptr,
        step.batch.kv_indptr,
        step.batch.kv_indices + np.int32(first),
        step.batch.kv_last_page_len,
        page_size,
    )
    backend = place.make_backend(step.kind)
    backend.plan(batch)
    out = backend.run(step.query, step.key, step.value, *far, scale=step.kind.scale)
    return compare((out, *(pages[first:] for pages in far)), reference(place, step))


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


def _optional(place: Place, report: Report, name: str, options: dict[str, Any]) -> None:
    """Kernels that FlashInfer compiles on demand; where none may be built, one row says so."""

    def work() -> str:
        from radixcache.kernels.torch_backend import TorchBackend

        lens, _ = _shrunk(place, [(1, 700), (64, 900)], 0)
        step = make_step(place, 5, lens, page_size=16, heads=(8, 2), dim=place.sizes.head_dims[-1])
        kind = step.kind._replace(**options)
        backend = place.make_backend(kind)
        with torch.inference_mode():
            backend.plan(step.batch)
            pages = step.k_pages.clone(), step.v_pages.clone()
            inputs = (step.query, step.key, step.value)
            out = backend.run(*inputs, *pages, scale=kind.scale, **options)
            plain = TorchBackend(place.device)
            plain.plan(step.batch)
            single = [t.float() for t in (*inputs, step.k_pages, step.v_pages)]
            right = plain.run(*single, scale=kind.scale, **options)
        return compare([out], [right])

    report.check(name, work)
