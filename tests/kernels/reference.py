"""A naive attention over pages, and random steps to try a backend with.

Everything here is plain numpy in float64 over page tables kept as Python lists: nothing is shared
with the backends under test but the arrays they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from radixcache.kernels.attention import (
    AttentionBackend,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
)


@dataclass
class Step:
    """One step's inputs. `tables[i]` are the pages of sequence i, `kv_lens[i]` its tokens; all have
    the first `share` pages in common."""

    batch: PagedBatch
    tables: list[list[int]]
    query_lens: list[int]
    kv_lens: list[int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    share: int = 0


def make_batch(tables: list[list[int]], queries: list[int], kv_lens: list[int], page_size: int):
    """The `PagedBatch` of sequences with these page tables."""

    def indptr(counts: list[int]) -> np.ndarray:
        return np.cumsum([0, *counts]).astype(np.int32)

    last = [n - (len(t) - 1) * page_size for t, n in zip(tables, kv_lens, strict=True)]
    return PagedBatch(
        qo_indptr=indptr(queries),
        kv_indptr=indptr([len(table) for table in tables]),
        kv_indices=np.array([page for table in tables for page in table], np.int32),
        kv_last_page_len=np.array(last, np.int32),
        page_size=page_size,
    )


def make_step(
    seed: int,
    lens: list[tuple[int, int]],
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (8, 2),
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    share: int = 0,
) -> Step:
    """A step of sequences with (new tokens, cached tokens) each, in shuffled pages.

    Slots that hold no cached token are NaN. With `share`, all sequences have their first `share`
    pages in common, as prefix caching gives.
    """
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    queries, kv_lens = [q for q, _ in lens], [q + c for q, c in lens]
    counts = [-(-n // page_size) for n in kv_lens]
    free = [int(page) for page in rng.permutation(sum(counts) + share + 3)]
    stem = [free.pop() for _ in range(share)]
    tables = [stem + [free.pop() for _ in range(n - share)] for n in counts]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch_rng).to(dtype)

    num_pages, total = sum(counts) + share + 3, sum(queries)
    k_pages = torch.full((num_pages, page_size, heads[1], dim), torch.nan, dtype=dtype)
    v_pages = k_pages.clone()
    for table, (_, cached) in zip(tables, lens, strict=True):
        slots = slots_of(table, np.arange(cached), page_size)
        k_pages[slots] = 2 * randn(cached, heads[1], dim)
        v_pages[slots] = randn(cached, heads[1], dim)
    return Step(
        batch=make_batch(tables, queries, kv_lens, page_size),
        tables=tables,
        query_lens=queries,
        kv_lens=kv_lens,
        query=2 * randn(total, heads[0], dim),
        key=2 * randn(total, heads[1], dim),
        value=randn(total, heads[1], dim),
        k_pages=k_pages,
        v_pages=v_pages,
        share=share,
    )


def random_step(
    seed: int,
    dims: tuple[int, ...] = (8, 16, 40, 64),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32, torch.bfloat16),
    most: int = 1200,
) -> tuple[Step, dict[str, Any]]:
    """Sequences long and short, fresh and cached, in any heads, pages and types, some with shared
    pages; and the options of a layer. Chunks and what is cached are in the order of `most`."""
    rng = np.random.default_rng(seed)
    page_size, kv_heads = int(rng.choice([1, 3, 4, 16])), int(rng.choice([1, 2, 8]))
    heads = kv_heads * int(rng.choice([1, 2, 3, 4, 7] if kv_heads < 8 else [1]))
    share = min(most // 4, int(rng.choice([0, 0, 20, 300]))) // page_size
    longest = min(most, int(rng.choice([0, 40, 400, 1200])))
    lens = [
        (
            int(rng.choice([1, 1, 2, 9, min(90, most)])),
            share * page_size + int(rng.integers(0, longest + 1)),
        )
        for _ in range(rng.integers(1, 7))
    ]
    if rng.random() < 0.2:
        lens[0] = (most // 2, lens[0][1])
    dim, dtype = int(rng.choice(dims)), dtypes[rng.integers(len(dtypes))]
    options = {
        "scale": 0.3,
        "window": [None, None, 1, 6, 40, 300, 1000][rng.integers(7)],
        "softcap": [None, None, 6.0][rng.integers(3)],
        "sinks": [None, None, torch.linspace(-9, 40, heads)][rng.integers(3)],
    }
    print(f"seed {seed}, {heads} heads on {kv_heads} of {dim} in {dtype}, {lens}, {options}")
    step = make_step(
        seed, lens, page_size=page_size, heads=(heads, kv_heads), dim=dim, dtype=dtype, share=share
    )
    return step, options


def with_images(seed: int, step: Step) -> Step:
    """The step with images among its new tokens, whose rows see each other."""
    rng, ahead, end = np.random.default_rng(seed), np.zeros(len(step.query), np.int32), 0
    for queries in step.query_lens:
        start, end = end, end + queries
        while start < end:
            last = min(end, start + int(rng.integers(1, 400)))
            if rng.random() < 0.5:
                ahead[start:last] = np.arange(last - start)[::-1]
            start = last
    return replace(step, batch=replace(step.batch, ahead=ahead))


def slots_of(table: list[int], positions: np.ndarray, page_size: int) -> tuple[Any, Any]:
    """Page and slot of the tokens at these positions."""
    return np.array(table)[positions // page_size], positions % page_size


def appended(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """The pages of keys and values with the step's new tokens, in float64."""
    sides = []
    for pages, new in ((step.k_pages, step.key), (step.v_pages, step.value)):
        side, rows, end = pages.double().numpy().copy(), new.double().numpy(), 0
        for table, queries, length in zip(step.tables, step.query_lens, step.kv_lens, strict=True):
            start, end = end, end + queries
            side[slots_of(table, np.arange(length - queries, length), step.batch.page_size)] = rows[
                start:end
            ]
        sides.append(side)
    return sides[0], sides[1]


def naive_attention(
    step: Step, *, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, both_ways: bool = False,
) -> np.ndarray:  # fmt: skip
    """[T, heads, dim] float64, one sequence and head at a time. Does not touch `step`."""
    heads, group = step.query.shape[1], step.query.shape[1] // step.key.shape[1]
    query, sides, end = step.query.double().numpy(), appended(step), 0
    out = np.zeros((*query.shape[:2], step.value.shape[2]))
    for table, queries, length in zip(step.tables, step.query_lens, step.kv_lens, strict=True):
        start, end, positions = end, end + queries, np.arange(length)
        pages, slots = slots_of(table, positions, step.batch.page_size)
        own = positions[length - queries :, None]
        ahead: Any = 0
        if both_ways:
            assert step.batch.ahead is not None
            ahead = step.batch.ahead[start:end, None]
        sees = (positions <= own + ahead) & (positions > own - (window or length))
        somebody_sees = sees.any(0, keepdims=True).T  # else there may be NaN
        for head in range(heads):
            if head % group == 0:
                keys, values = (side[pages, slots, head // group] for side in sides)
            scores = scale * query[start:end, head] @ keys.T
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(sees, scores, -np.inf)
            if sinks is not None:  # a key more, without a value
                sink = np.full((queries, 1), float(sinks[head]))
                scores = np.concatenate([scores, sink], axis=1)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights = (weights / weights.sum(1, keepdims=True))[:, :length]
            out[start:end, head] = weights @ np.where(somebody_sees, values, 0)
    assert not np.isnan(out).any(), "the step reads an unwritten slot"
    return out


def spoil(step: Step, bad: float, window: int | None = None) -> tuple[Step, Step, torch.Tensor]:
    """The step with new tokens whose K or V are `bad` in one head, the step with zeros there, and
    [T, heads] whether a row sees one of them."""
    rng, group = np.random.default_rng(len(step.value)), step.query.shape[1] // step.key.shape[1]
    spoilt, zeroed = (
        replace(step, key=step.key.clone(), value=step.value.clone()) for _ in range(2)
    )
    sees, end = torch.zeros(step.query.shape[:2], dtype=torch.bool), 0
    for queries in step.query_lens:
        start, end = end, end + queries
        for token in rng.integers(start, end, queries // 3 + 1).tolist():
            head, side = int(rng.integers(step.key.shape[1])), rng.choice(["key", "value"])
            getattr(spoilt, side)[token, head, int(rng.integers(step.key.shape[2]))] = bad
            zeroed.key[token, head] = zeroed.value[token, head] = 0
            last = end if window is None else min(end, token + window)
            sees[token:last, head * group : (head + 1) * group] = True
    return spoilt, zeroed, sees


def assert_only_rows_that_see_it_are_spoilt(
    attend: Callable[..., Any], backend: AttentionBackend, seed: int, most: int
) -> None:
    """Of a random step with such tokens, in pages of several dtypes."""
    kinds = [(torch.float32, torch.inf), (torch.float16, 3e5), (torch.int8, -1e8)]
    dtype, bad = [*kinds, (torch.float32, torch.nan)][seed % 4]
    step, options = random_step(seed, (32, 64), (torch.float32,), most=most)
    spoilt, zeroed, sees = spoil(step, bad, options["window"])
    out, *_ = attend(spoilt, backend, dtype, **options)
    expected, *_ = attend(zeroed, backend, dtype, **options)
    assert out.isnan()[sees].all() and sees.any()
    torch.testing.assert_close(out[~sees], expected[~sees], atol=5e-5, rtol=0)


def inputs_of(step: Step, *, sinks: torch.Tensor | None = None, **options: Any) -> LayerInputs:
    """The step's tensors themselves, for a layer with these options."""
    dims = step.query.shape[1], step.key.shape[1], step.key.shape[2], step.value.shape[2]
    pages, kind = LayerPages(step.k_pages, step.v_pages), LayerKind(*dims, **options)
    return LayerInputs(step.query, step.key, step.value, pages, kind, sinks)


def run(step: Step, backend: AttentionBackend, **options: Any) -> torch.Tensor:
    """The backend's output over pages with gaps between them; `step` keeps its own."""
    copied = replace(step, k_pages=with_gaps(step.k_pages), v_pages=with_gaps(step.v_pages))
    return backend.plan(step.batch).run(inputs_of(copied, **options))


def behind_windows(step: Step, window: int) -> Step:
    """The step with tables of one window beside the others, and NaN in all other pages."""
    size, lens = step.batch.page_size, list(zip(step.query_lens, step.kv_lens, strict=True))
    first = [max(0, n - queries - window + 1) // size * size for queries, n in lens]
    tables = [table[n // size :] for table, n in zip(step.tables, first, strict=True)]
    kept = [n - start for n, start in zip(step.kv_lens, first, strict=True)]
    short = replace(
        make_batch(tables, step.query_lens, kept, size),
        first=np.array(first, np.int32),
        ahead=step.batch.ahead,
    )
    sides = [step.k_pages.clone(), step.v_pages.clone()]
    for side in sides:
        side[np.setdiff1d(np.arange(len(side)), short.kv_indices)] = torch.nan
    batch = replace(step.batch, window=short)
    return replace(step, batch=batch, k_pages=sides[0], v_pages=sides[1])


def with_gaps(pages: torch.Tensor) -> torch.Tensor:
    """A copy of pages between which other memory lies, as where two kinds of layers share it."""
    size = pages[0].numel()
    memory = pages.new_full((len(pages), size + 48), torch.nan)
    return memory[:, :size].view_as(pages).copy_(pages)


def error(step: Step, out: torch.Tensor, **options: Any) -> float:
    """The largest difference from the naive attention; infinite if there is a NaN."""
    assert out.shape == step.query.shape and out.dtype == step.query.dtype and out.is_contiguous()
    difference = np.abs(out.double().numpy() - naive_attention(step, **options))
    return float("inf") if np.isnan(difference).any() else float(difference.max())
