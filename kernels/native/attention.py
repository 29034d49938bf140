"""Attention over KV pages on a CPU."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import (
    Arrays,
    AttentionBackend,
    AttentionPlan,
    FixedShape,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
)
from radixcache.kernels.kv_format import stored_dim
from radixcache.kernels.native.library import check, kernel, kv_format, plan_function

NO_WINDOW = 2**31 - 1

_CONTRADICTIONS = (
    "the page tables are of different batches",
    "a sequence without pages, or pages without a sequence",
    "a last page or a number of tokens has an impossible length",
    "a sequence has more new tokens than its pages hold",
    "a negative page number",
    "a row sees keys that the batch does not have",
)
"""In the order of `plan_batch` in attention.h."""


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("sequences", "page_size")),
        *(
            (name, c_void_p)
            for name in (
                *("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "first", "slots"),
                "ahead",
            )
        ),
    ]


class Pages(ctypes.Structure):
    """`Pages` of attention.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride")),
        ("format", c_int32),
    ]


def pages_of(pages: LayerPages, dtype: torch.dtype, dims: tuple[int, int, int, int, int]) -> Pages:
    """The structure of a layer's pages.

    Args:
        dims: pages, page size, heads, and the dimensions of keys and values.

    Raises:
        ValueError: the tensors have other shapes, or gaps within a page.
    """
    *shape, dim, value_dim = dims
    for tensor, last in ((pages.k, dim), (pages.v, value_dim)):
        check(tensor, dtype, (*shape, stored_dim(last, dtype)), apart=True)
    strides = (tensor.stride(0) * tensor.itemsize for tensor in pages)
    return Pages(*(tensor.data_ptr() for tensor in pages), *strides, kv_format(pages.k))


class Heads(ctypes.Structure):
    """`Heads` of attention.h."""

    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "value_dim", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("rotated", "both_ways")),
    ]

    @property
    def stored_dims(self) -> tuple[int, int, int]:
        """KV heads, and the dimensions of both kinds of pages."""
        return self.kv_heads, self.dim - self.rotated, self.rotated or self.value_dim


@lru_cache
def heads_of(kind: LayerKind) -> Heads:
    """The structure of a layer's attention.

    Raises:
        ValueError: the numbers of heads, or the window, are impossible.
    """
    heads, kv_heads, _, value_dim, scale, window, softcap, mla, both_ways = kind
    if kv_heads < 1 or heads % kv_heads or (window is not None and window < 1):
        raise ValueError(f"impossible: {heads} query heads on {kv_heads}, a window of {window}")
    window = min(window or NO_WINDOW, NO_WINDOW)
    rotated, dims = value_dim if mla else 0, (kind.query_dim, kind.out_dim)
    return Heads(heads, kv_heads, *dims, window, scale, softcap or 0, rotated, both_ways)


class NativeAttention(AttentionBackend):
    """Attention over pages on a CPU where `problem()` is None; any heads and page size.

    Keys are cut into blocks at fixed positions. A row attends over each block separately, and the
    partial results are merged in order. So threads share the work evenly, and a block that several
    sequences have in their tables is read once for all of them.
    """

    name, room = "native kernels", "native"

    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        assert fixed is None, "there are no CUDA graphs on a CPU"
        return NativePlan(batch, arrays)

    def _check_batch(self, batch: PagedBatch) -> None:
        if batch.shared:  # `NativePlan` checks the rest
            super()._check_batch(batch)


def _as_int32(table: NDArray[np.integer]) -> NDArray[np.int32]:
    found = np.ascontiguousarray(table, np.int32)
    if found is not table and (found != table).any():
        raise ValueError("the page tables have numbers that int32 cannot hold")
    return found


class NativePlan(AttentionPlan):
    """A checked batch, as the kernels take it.

    A step of one sequence spends as long between two kernels as numpy takes for thirty operations
    whose code is in no cache any more: so one function of C++ checks the tables.

    Attributes:
        num_tokens: T, all new ones.
        query_lens: [B] new tokens of each sequence.
        numbers: the other arrays, int64 and contiguous.
    """

    def __init__(self, batch: PagedBatch, arrays: Arrays) -> None:
        self.numbers = [np.ascontiguousarray(array, np.int64) for array in arrays]
        starts, offsets, indices, last = (
            _as_int32(table)
            for table in (
                batch.qo_indptr,
                batch.kv_indptr,
                batch.kv_indices,
                batch.kv_last_page_len,
            )
        )
        count, size, num_pages = len(last), batch.page_size, len(indices)
        before, to, ahead = (
            None if table is None else _as_int32(table)
            for table in (batch.first, batch.write_indices, batch.ahead)
        )
        others = len(starts) - 1, len(offsets) - 1, count if before is None else len(before)
        if {*others} != {count}:
            raise ValueError(_CONTRADICTIONS[0])
        if to is not None and len(to) != num_pages:
            raise ValueError(_CONTRADICTIONS[1])
        self.num_tokens, self._page_size = int(starts[-1]), size
        if not 0 <= self.num_tokens <= num_pages * size or size > NO_WINDOW:
            raise ValueError(_CONTRADICTIONS[2])
        lens, slots = np.empty((2, count), np.int32), np.empty(self.num_tokens, np.int64)
        if ahead is not None and len(ahead) != self.num_tokens:
            raise ValueError(_CONTRADICTIONS[0])
        self._held = starts, offsets, indices, lens, slots, ahead
        made = lens[0].ctypes.data, lens[1].ctypes.data, slots.ctypes.data
        tables = (table.ctypes.data for table in (starts, offsets, indices))
        seen = None if ahead is None else ahead.ctypes.data
        self._batch = _Batch(count, size, *tables, *made, seen)
        found = plan_function()(
            *(ctypes.addressof(self._batch), last.ctypes.data),
            *(None if table is None else table.ctypes.data for table in (before, to)),
            *(num_pages, *made),
        )
        if found < 0:
            raise ValueError(_CONTRADICTIONS[-found - 1])
        self._num_pages = found

    @property
    def query_lens(self) -> NDArray[np.int32]:
        return np.diff(self._held[0])

    @cached_property
    def arrays(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The other arrays as tensors, over the same memory."""
        return [torch.from_numpy(array) for array in self.numbers]

    def address_for(self, tokens: int, k_pages: torch.Tensor) -> int:
        """The address of the planned batch, for a kernel.

        Raises:
            ValueError: the step was not planned for these pages or so many tokens.
        """
        pages, size = k_pages.shape[:2]
        if (tokens, size) != (self.num_tokens, self._page_size) or pages < self._num_pages:
            raise ValueError("the step was planned for other pages or tokens")
        return ctypes.addressof(self._batch)

    def run(self, inputs: LayerInputs) -> torch.Tensor:
        """As in `AttentionPlan`; tokens need not be adjacent in memory, as columns of a product.

        Raises:
            ValueError: the tensors' shapes contradict each other or the plan.
            MemoryError: the sums of the step's rows do not fit into memory.
        """
        query, key, value, (k_pages, _), layer, sinks, written = inputs
        heads, kv_heads, dim, value_dim, *_ = layer
        tokens, (pages, size) = len(query), k_pages.shape[:2]
        batch, layer_heads = self.address_for(tokens, k_pages), heads_of(layer)
        check(query, query, (tokens, heads, layer.query_dim), apart=True)
        check(key, query, (tokens, kv_heads, dim), apart=True)
        check(value, query, (tokens, kv_heads, value_dim), apart=True)
        page_struct = pages_of(inputs.pages, k_pages.dtype, (pages, size, kv_heads, dim, value_dim))
        if sinks is not None:
            sinks = sinks.float().contiguous()
            check(sinks, sinks, (heads,))
        out = query.new_empty(tokens, heads, layer.out_dim)
        kernel("attend", query.dtype)(
            *(batch, ctypes.addressof(layer_heads)),
            *(query.data_ptr(), query.stride(0), 0 if written else key.data_ptr(), key.stride(0)),
            *(value.data_ptr(), value.stride(0), ctypes.addressof(page_struct)),
            *(out.data_ptr(), 0 if sinks is None else sinks.data_ptr()),
        )
        return out
