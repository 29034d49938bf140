"""Every path of the FlashInfer backend, in steps of any kind, against the naive reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import LayerInputs, LayerPages, PagedBatch, SharedPrefix
from radixcache.runtime.model.cuda_graphs import Shape, pad, prefill_shapes
from radixcache.runtime.model.kv_pool import KVPool, LayerShape
from tests.gpu.conftest import Row
from tests.gpu.place import LAYER, Place
from tests.kernels.reference import Step, appended, inputs_of, make_step, naive_attention

POISON = 1000.0
"""Value of every slot without a token: attention to one shows in the output at once."""

FAR = (1 << 31) + (1 << 24)
"""Elements of a tensor of pages, whose last ones are used."""

Lens = list[tuple[int, int]]
"""New and cached tokens of each sequence."""

SHAPES: dict[str, tuple[Lens, int]] = {
    "decode": ([(1, 700), (1, 0), (1, 33), (1, 1500)], 0),
    "suffix": ([(64, 2048), (16, 777), (200, 1000)], 0),
    "fresh": ([(300, 0), (17, 0), (64, 0)], 0),
    "mixed": ([(1, 900), (1, 31), (40, 512), (129, 0)], 0),
    "cascade": ([(1, 1024 + n) for n in (3, 0, 170, 30, 6, 512)], 1024),
    "cascade, mixed": ([*((1, 1024 + n) for n in (3, 0, 170, 30)), (20, 1124)], 1024),
}
"""The sequences of a step, and how many tokens they share."""

RULES: list[dict[str, Any]] = [{"window": 256}, {"softcap": 20.0}, {"window": 256, "softcap": 20.0}]


def step_of(
    place: Place, seed: int, lens: Sequence[tuple[int, int]], share: int = 0, page_size: int = 16,
    heads: tuple[int, int] = (8, 2), dim: int = 128,
) -> Step:  # fmt: skip
    """A step of so many tokens, on a simulated GPU of fewer, whose decodes share a prefix."""
    by = place.shrink
    fewer = [(min(new, max(2, new // by)), cached // by) for new, cached in lens]
    pages = share // by // page_size
    step = make_step(
        seed, fewer, page_size=page_size, heads=heads, dim=dim, dtype=place.dtype, share=pages
    )
    if pages:
        shared = SharedPrefix(0, step.batch.num_decodes, pages)
        step.batch = replace(step.batch, shared=(shared,))
    for side in (step.k_pages, step.v_pages):
        side.nan_to_num_(POISON)
    return step


def inputs_on(place: Place, step: Step, **rules: Any) -> LayerInputs:
    inputs = inputs_of(step, scale=step.query.shape[2] ** -0.5, **rules)
    query, key, value, *pages = (tensor.to(place.device) for tensor in (*inputs[:3], *inputs.pages))
    return LayerInputs(query, key, value, LayerPages(*pages), inputs.layer)


def error(step: Step, out: torch.Tensor, **rules: Any) -> float:
    """The largest error over the largest value; infinite where nothing sensible was found."""
    right = naive_attention(step, scale=step.query.shape[2] ** -0.5, **rules)
    worst = np.abs(out.double().cpu().numpy() - right).max() / np.abs(right).max()
    return float(np.nan_to_num(worst, nan=np.inf))


def compare(
    place: Place, step: Step, out: torch.Tensor, pages: Sequence[torch.Tensor], **rules: Any
) -> float:
    """The error of the output; AssertionError if it is too large, or pages are not appended to."""
    worst = error(step, out, **rules)
    assert worst <= place.tolerance
    for side, right in zip(pages, appended(step), strict=True):
        assert np.array_equal(side.double().cpu().numpy(), right), "appended is something else"
    return worst


def attend(
    place: Place, step: Step, batch: PagedBatch | None = None, **rules: Any
) -> tuple[torch.Tensor, LayerPages]:
    inputs = inputs_on(place, step, **rules)
    plan = place.backend(inputs.layer).plan(batch or step.batch)
    return plan.run(inputs), inputs.pages


@pytest.mark.parametrize(
    ("heads", "dim"), [((8, 8), 128), ((8, 2), 64), ((8, 2), 128), ((8, 1), 64)], ids=str
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_steps_equal_the_reference(
    place: Place, shape: str, page_size: int, heads: tuple[int, int], dim: int
) -> None:
    step = step_of(place, 7, *SHAPES[shape], page_size=page_size, heads=heads, dim=dim)
    compare(place, step, *attend(place, step))


@pytest.mark.parametrize("heads", [(8, 2), (8, 4)], ids=["tensor cores", "none"])
@pytest.mark.parametrize("rules", RULES, ids=" and ".join)
@torch.inference_mode()
def test_windows_and_softcaps_equal_the_reference(
    place: Place, rules: dict[str, Any], heads: tuple[int, int]
) -> None:
    step = step_of(place, 5, [(1, 700), (64, 900)], heads=heads)
    compare(place, step, *attend(place, step, **rules), **rules)


@torch.inference_mode()
def test_a_wrong_page_is_seen(place: Place) -> None:
    step = step_of(place, 3, [(1, 70), (5, 90)])
    indices = step.batch.kv_indices.copy()
    indices[0] = np.setdiff1d(np.arange(len(step.k_pages)), indices)[0]  # full of poison
    out, _ = attend(place, step, replace(step.batch, kv_indices=indices))
    assert error(step, out) > place.tolerance


@pytest.mark.parametrize("rows", [5, 256])
@torch.inference_mode()
def test_a_cascade_in_a_graph_equals_the_reference(place: Place, rows: int) -> None:
    """Up to as many rows as a graph may have: their results must fit the workspace."""
    rng, rows = np.random.default_rng(4), place.short(rows, least=5)
    lens = [[(1, 512 + int(n)) for n in rng.integers(0, 128, rows)] for _ in range(2)]
    replayed(place, [step_of(place, i, each, 512, heads=(32, 8)) for i, each in enumerate(lens)],
             Shape(rows, rows, True))  # fmt: skip


@torch.inference_mode()
def test_steps_with_prefill_in_graphs_equal_the_reference(place: Place, row: Row) -> None:
    """Decodes and chunks, one of them behind a long prefix, in padded batches."""
    shapes = prefill_shapes(place.backend(LAYER), 63)[:: min(place.shrink, 9)]
    worst = 0.0
    for shape in shapes:
        rng = np.random.default_rng(shape.tokens)
        steps: list[Step] = []
        for count in (1, shape.sequences - 1, shape.sequences // 2):
            cuts = np.sort(rng.choice(np.arange(1, shape.tokens), count, replace=False))
            new = np.sort(np.diff([0, *cuts]))
            new[-1] = max(2, new[-1])
            cached = rng.choice([0, 40, 700], count)
            cached[-1] = 4000
            lens = [(int(n), int(c)) for n, c in zip(new, cached, strict=True)]
            steps.append(step_of(place, len(steps), lens, heads=(32, 8)))
        worst = max(worst, replayed(place, steps, shape))
    row(f"worst error in {len(shapes)} graphs with prefill", worst, "of the largest value")


def replayed(place: Place, steps: list[Step], shape: Shape) -> float:
    """The worst error of steps replayed in one graph, each with other page tables."""
    given = [inputs_on(place, step) for step in steps]
    backend = place.backend(given[0].layer)
    most = max(len(step.k_pages) for step in steps) + 1
    backend.allocate_fixed(max(shape.sequences, 64), shape.sequences * most + shape.tokens)
    pages = LayerPages(*(side.new_zeros(most, *side.shape[1:]) for side in given[0].pages))
    query, key, value = (t.new_zeros(shape.tokens, *t.shape[1:]) for t in given[0][:3])
    inputs = LayerInputs(query, key, value, pages, given[0].layer)
    replay: Callable[[], torch.Tensor] | None = None
    errors = []
    for step, one in zip(steps, given, strict=True):
        used = [side[: len(step.k_pages)] for side in pages]
        for to, tensor in zip([query, key, value, *used], [*one[:3], *one.pages], strict=True):
            to[: len(tensor)].copy_(tensor)
            to[len(tensor) :].zero_()
        plan = backend.plan_fixed(pad(step.batch, shape, most - 1))
        replay = replay or place.capture(partial(plan.run, inputs))
        errors.append(compare(place, step, replay()[: len(step.query)], used))
    return max(errors)


@torch.inference_mode()
def test_pages_beyond_2_to_the_31_elements_are_found(place: Place) -> None:
    """The kernels must multiply page numbers in 64 bits."""
    step = step_of(place, 9, [(1, 300), (50, 200)])
    near = inputs_on(place, step)
    count = FAR // place.shrink**4 // step.k_pages[0].numel() + len(step.k_pages)
    first = count - len(step.k_pages)
    far = LayerPages(*(side.new_zeros(count, *side.shape[1:]) for side in near.pages))
    for side, pages in zip(far, near.pages, strict=True):
        side[first:].copy_(pages)
    batch = replace(step.batch, kv_indices=step.batch.kv_indices + np.int32(first))
    out = place.backend(near.layer).plan(batch).run(near._replace(pages=far))
    compare(place, step, out, [side[first:] for side in far])


@pytest.mark.parametrize("is_far", [False, True])
@torch.inference_mode()
def test_pages_are_copied(place: Place, is_far: bool) -> None:
    """In all layers at once, also where a page is both source and target."""
    layers, size, heads, dim = 4, 16, 2, 128
    count = FAR // place.shrink**2 // (2 * layers * size * heads * dim) if is_far else 64
    shapes = [LayerShape(heads, dim, dim)] * layers
    pool = KVPool(shapes, count, size, place.dtype, place.device)
    last = count - 1
    copies = [(0, last, 5), (last, 1, 16), (2, 3, 1), (last - 1, last - 2, 9)]
    used = sorted({page for source, target, _ in copies for page in (source, target)})
    for k_pages, v_pages in pool.layers:
        k_pages[used], v_pages[used] = place.randn(2, len(used), size, heads, dim)
    before = [[side[used].clone() for side in layer] for layer in pool.layers]
    pool.copy(copies)
    for layer, old in zip(pool.layers, before, strict=True):
        for side, was in zip(layer, old, strict=True):
            expected = was.clone()
            for source, target, slots in copies:
                expected[used.index(target), :slots] = was[used.index(source), :slots]
            assert torch.equal(side[used], expected)
