"""Makes random steps to test an attention backend with, and their right results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from radixcache.bench.gpu.place import Place
from radixcache.kernels.attention import (
    AttentionBackend,
    Fp8Pages,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
    SharedPrefix,
)
from radixcache.kernels.kv_format import FP8, encode
from radixcache.kernels.torch_backend import TorchBackend

TOLERANCE = 2e-2
"""Largest error of an output over the largest output; bfloat16 has 8 bits."""

POISON = 1000.0
"""Value of every slot without a token: attention to one shows in the output at once."""

Lens = Sequence[tuple[int, int]]
"""New and cached tokens of each sequence."""

Way = tuple[Callable[[LayerKind], AttentionBackend], bool]
"""A function that makes a backend, and whether it is told which prefixes are shared."""


@dataclass
class Step:
    """The inputs of one layer in one step. Running it needs copies of the pages."""

    batch: PagedBatch
    kind: LayerKind
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: LayerPages

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value, *self.pages

    def inputs(self, pages: LayerPages) -> LayerInputs:
        return LayerInputs(self.query, self.key, self.value, pages, self.kind)


def make_batch(rng: np.random.Generator, lens: Lens, page_size: int, share: int = 0) -> PagedBatch:
    """Sequences in shuffled pages; the decodes share `share` tokens, in whole pages."""
    counts = [-(-(new + cached) // page_size) for new, cached in lens]
    stem = share // page_size
    free = iter(rng.permutation(sum(counts) + stem + 3))
    common = [next(free) for _ in range(stem)]
    tables = [
        [*common, *(next(free) for _ in range(count - stem))]
        if stem and new == 1
        else [next(free) for _ in range(count)]
        for (new, _), count in zip(lens, counts, strict=True)
    ]
    decodes = sum(new == 1 for new, _ in lens)
    return PagedBatch(
        qo_indptr=np.cumsum([0, *(new for new, _ in lens)], dtype=np.int32),
        kv_indptr=np.cumsum([0, *counts], dtype=np.int32),
        kv_indices=np.concatenate(tables).astype(np.int32),
        kv_last_page_len=np.array([(sum(pair) - 1) % page_size + 1 for pair in lens], np.int32),
        page_size=page_size,
        shared=(SharedPrefix(0, decodes, stem),) if stem else (),
    )


def make_step(
    place: Place,
    seed: int,
    lens: Lens,
    *,
    page_size: int,
    heads: tuple[int, int],
    dim: int,
    share: int = 0,
    **rules: Any,
) -> Step:
    """A step with random numbers in the slots of cached tokens, and poison in all others.

    `rules` are the window and the softcap of the layer.
    """
    batch = make_batch(np.random.default_rng(seed), lens, page_size, share)
    torch.manual_seed(seed)
    tokens = int(batch.qo_indptr[-1])
    num_pages = int(batch.kv_indices.max()) + 3
    cached = torch.from_numpy(_cached_slots(batch)).to(place.device)
    pages = []
    for scale in (2.0, 1.0):
        side = torch.full(
            (num_pages, page_size, heads[1], dim), POISON, dtype=place.dtype, device=place.device
        )
        side.flatten(0, 1)[cached] = place.randn(len(cached), heads[1], dim, scale=scale)
        pages.append(side)
    return Step(
        batch,
        LayerKind(*heads, dim, dim, dim**-0.5, **rules),
        place.randn(tokens, heads[0], dim, scale=2.0),
        place.randn(tokens, heads[1], dim, scale=2.0),
        place.randn(tokens, heads[1], dim),
        LayerPages(*pages),
    )


@torch.inference_mode()
def seconds_of_decodes(
    place: Place,
    heads: tuple[int, int],
    lens: Lens,
    share: int,
    ways: Sequence[Way],
    dtypes: Sequence[torch.dtype] = (),
) -> list[float]:
    """Seconds of one planned layer in each of `ways`, over so many layers that no pages stay in the
    L2 cache.

    Args:
        dtypes: of the pages, for each way; the place's by default.
    """  # fmt: skip
    dim, rows = place.sizes.head_dim, len(lens)
    kind = LayerKind(*heads, dim, dim, dim**-0.5)
    batch = make_batch(np.random.default_rng(rows), lens, 16, share)
    query = place.randn(rows, heads[0], dim)
    key, value = place.randn(2, rows, heads[1], dim)
    shape = (int(batch.kv_indices.max()) + 1, batch.page_size, heads[1], dim)
    in_use = 2 * len(np.unique(batch.kv_indices)) * math.prod(shape[1:]) * place.dtype.itemsize
    count = min(256, max(2, -(-place.sizes.beyond_l2 // in_use)))
    layers = [LayerPages(place.randn(*shape), place.randn(*shape)) for _ in range(count)]
    seconds = []
    for (make, shares), dtype in zip(ways, dtypes or [place.dtype] * len(ways), strict=True):
        backend = make(kind)
        backend.allocate_fixed(rows, len(batch.kv_indices) + rows)
        plan = backend.plan_fixed(batch if shares else replace(batch, shared=()))
        stored = [stored_in(pages, dtype) for pages in layers]
        works = [partial(plan.run, LayerInputs(query, key, value, pages, kind)) for pages in stored]
        seconds.append(place.gpu_seconds(works, place.sizes.repeat))
    return seconds


def stored_in(pages: LayerPages, dtype: torch.dtype) -> LayerPages:
    """The same in pages of another dtype, as `kv_format` says."""
    if dtype == pages.k.dtype:
        return pages
    return (Fp8Pages if dtype == FP8 else LayerPages)(*(encode(side, dtype) for side in pages))


def _cached_slots(batch: PagedBatch) -> np.ndarray:
    """Slots of the cached tokens, each once."""
    slots = [np.empty(0, np.int64)]
    for start, end, cached in zip(
        batch.kv_indptr, batch.kv_indptr[1:], batch.kv_lens - batch.query_lens, strict=False
    ):
        table = batch.kv_indices[start:end].astype(np.int64)
        every = table[:, None] * batch.page_size + np.arange(batch.page_size)
        slots.append(every.ravel()[:cached])
    return np.unique(np.concatenate(slots))


@torch.inference_mode()
def reference(place: Place, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and the pages afterwards, by `TorchBackend` in float32, without sharing."""
    plan = TorchBackend(place.device).plan(replace(step.batch, shared=()))
    query, key, value, *pages = (tensor.float() for tensor in step.tensors)
    out = plan.run(LayerInputs(query, key, value, LayerPages(*pages), step.kind))
    return out, pages[0], pages[1]


@torch.inference_mode()
def attend(
    backend: AttentionBackend, step: Step, batch: PagedBatch | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = LayerPages(step.pages.k.clone(), step.pages.v.clone())
    plan = backend.plan(batch or step.batch)
    return plan.run(step.inputs(pages)), *pages


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error over the largest value; infinite where nothing sensible was found."""
    worst = (found.float() - right).abs().max() / right.abs().max()
    return float(worst.nan_to_num(torch.inf))


def compare(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
    """Says how far they differ; AssertionError if they differ too far."""
    worst = error(found[0], right[0])
    assert worst <= TOLERANCE, f"error {worst:.2g} of the largest value, {TOLERANCE} allowed"
    for name, pages, expected in zip("KV", found[1:], right[1:], strict=False):
        wrong = int((pages.float() != expected).any(-1).sum())
        assert not wrong, f"{wrong} vectors of the {name} pages are not what was appended"
    return f"error {worst:.1e}"


def with_wrong_page(batch: PagedBatch) -> PagedBatch:
    """The batch with a wrong page where the first sequence begins."""
    indices = batch.kv_indices.copy()
    wrong = indices.max() + 1  # a page in the pool that is full of poison
    stem = indices == indices[0]  # in every table that shares it
    indices[stem] = wrong
    return replace(batch, kv_indices=indices)
