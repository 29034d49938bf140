"""The attention interface: plan once per step, run once per layer.

A step is a flat batch of T new tokens of B sequences. A sequence's KV lies in pages, cached or
written by this step. Its new tokens are the last ones of its KV, so causal attention is aligned at
the bottom right. The arrays are those that FlashInfer's paged wrappers take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.kv_format import FP8

Arrays = Sequence[NDArray[np.integer]]


class SharedPrefix(NamedTuple):
    """Sequences [first, first + size) of a batch have their first `num_pages` pages in common."""

    first: int
    size: int
    num_pages: int


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The page tables and lengths of one step; all arrays int32, on the host.

    Attributes:
        qo_indptr: [B + 1] offsets of each sequence's new tokens in the flat batch.
        kv_indptr: [B + 1] offsets of each sequence's pages in `kv_indices`.
        kv_indices: [kv_indptr[-1]] page numbers, the new tokens' pages included.
        kv_last_page_len: [B] used slots of each last page, 1..page_size.
        page_size: tokens per page.
        shared: groups of sequences that begin with the same pages, in order and disjoint; never
            with a sequence's last page. A backend may read these pages once per group.
        window: the tables of the same rows for layers with a window, if these keep their pages
            apart; then the other tables are for the layers without.
        first: [B] of such a `window`, tokens before each table, which `kv_lens` and `positions`
            leave out. Causal masks are aligned at the bottom right and windows are relative, so a
            short table serves as a short sequence.
        ahead: [T] keys behind its own that each row sees in layers that look `both_ways`, the rest
            of its image; None if no row sees any. All are new tokens of the batch.
        write_indices: page numbers in place of `kv_indices` for the new tokens' K/V: the spare page
            stands for pages that are read and must not be written. None if there are none.
    """

    qo_indptr: NDArray[np.int32]
    kv_indptr: NDArray[np.int32]
    kv_indices: NDArray[np.int32]
    kv_last_page_len: NDArray[np.int32]
    page_size: int
    shared: tuple[SharedPrefix, ...] = ()
    window: PagedBatch | None = None
    first: NDArray[np.int32] | None = None
    write_indices: NDArray[np.int32] | None = None
    ahead: NDArray[np.int32] | None = None

    @classmethod
    def of(
        cls,
        tables: Sequence[NDArray[np.int32]],
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_size: int,
        shared: tuple[SharedPrefix, ...] = (),
        window: PagedBatch | None = None,
        first: NDArray[np.int32] | None = None,
        ahead: NDArray[np.int32] | None = None,
    ) -> PagedBatch:
        """The batch of sequences with these page tables, which may be longer than is needed."""
        counts = [-(-length // page_size) for length in kv_lens]
        used = [table[:count] for table, count in zip(tables, counts, strict=True)]
        lasts = [(length - 1) % page_size + 1 for length in kv_lens]
        batch = cls(
            qo_indptr=offsets(query_lens),
            kv_indptr=offsets(counts),
            kv_indices=np.concatenate(used),
            kv_last_page_len=np.array(lasts, np.int32),
            page_size=page_size,
            shared=shared,
            window=window,
            first=first,
            ahead=ahead,
        )
        lens = np.array([query_lens, kv_lens], np.int32)
        longer = (at for at, count in enumerate(query_lens) if count != 1)
        # What the cached properties would compute again.
        vars(batch).update(query_lens=lens[0], kv_lens=lens[1])
        vars(batch)["num_decodes"] = next(longer, len(counts))
        return batch

    def serves(self, kind: LayerKind) -> bool:
        """Whether these are the tables of such layers."""
        if self.window is None and self.first is None:
            return True
        return (kind.window is None) == (self.first is None)

    @cached_property
    def num_decodes(self) -> int:
        """Leading sequences with one new token each."""
        (longer,) = (self.query_lens != 1).nonzero()
        return longer.item(0) if len(longer) else len(self.query_lens)

    @cached_property
    def query_lens(self) -> NDArray[np.int32]:
        """[B] new tokens of each sequence."""
        return self.qo_indptr[1:] - self.qo_indptr[:-1]

    @cached_property
    def kv_lens(self) -> NDArray[np.int32]:
        """[B] tokens of each sequence, new ones included."""
        pages = self.kv_indptr[1:] - self.kv_indptr[:-1]
        return (pages - 1) * np.int32(self.page_size) + self.kv_last_page_len

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[T] absolute position of each new token in its sequence."""
        lens = self.query_lens
        if self.num_decodes == len(lens):
            return self.kv_lens.astype(np.int64) - 1
        first = self.kv_lens - lens - self.qo_indptr[:-1]
        return np.arange(self.qo_indptr[-1], dtype=np.int64) + np.repeat(first, lens)

    def slots(self) -> NDArray[np.int64]:
        """[T] flat slot (page * page_size + offset) that each new token's K/V is written to."""
        positions = self.positions
        page = np.repeat(self.kv_indptr[:-1], self.query_lens) + positions // self.page_size
        indices = self.kv_indices if self.write_indices is None else self.write_indices
        return indices[page].astype(np.int64) * self.page_size + positions % self.page_size

    def rows(self, first: int, end: int) -> PagedBatch:
        """The batch of sequences [first, end) alone, without `shared` and `window`."""
        if not first and end == len(self.query_lens):
            return replace(self, shared=(), window=None) if self.shared or self.window else self
        qo_indptr, kv_indptr = self.qo_indptr[first : end + 1], self.kv_indptr[first : end + 1]
        indices = self.write_indices
        if indices is not None:
            indices = indices[kv_indptr[0] : kv_indptr[-1]]
        return PagedBatch(
            qo_indptr=qo_indptr - qo_indptr[0],
            kv_indptr=kv_indptr - kv_indptr[0],
            kv_indices=self.kv_indices[kv_indptr[0] : kv_indptr[-1]],
            kv_last_page_len=self.kv_last_page_len[first:end],
            page_size=self.page_size,
            write_indices=indices,
            ahead=None if self.ahead is None else self.ahead[self.qo_indptr[first] : qo_indptr[-1]],
        )

    def sparing(self, counts: Sequence[int], spare_page: int) -> PagedBatch:
        """The same batch, but the first pages of each sequence, so many, are not written."""
        if not any(counts):
            return self
        to, offsets = self.kv_indices.copy(), self.kv_indptr.tolist()
        for start, end, count in zip(offsets[:-1], offsets[1:], counts, strict=True):
            to[start : min(end, start + count)] = spare_page
        return replace(self, write_indices=to)


def offsets(counts: Iterable[int]) -> NDArray[np.int32]:
    """[len(counts) + 1] int32, sums of the first counts. `np.cumsum` of a short list is slow."""
    return np.array([0, *accumulate(counts)], np.int32)


class LayerKind(NamedTuple):
    """The shape and rules of a layer's attention; layers of one kind share a plan.

    Attributes:
        scale: factor on the scores.
        window: a query at position p sees keys at positions > p - window (transformers' rule).
        softcap: scores become ``softcap * tanh(scores / softcap)`` before masking.
        mla: multi-head latent attention with its projections absorbed. In place of keys, the one
            KV head keeps a latent of `head_dim`, which serves as key and value; in place of
            values, the rotated part of the key, of `value_dim`.
        both_ways: whether an image's rows see all of it, as `PagedBatch.ahead` says.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    mla: bool = False
    both_ways: bool = False

    @property
    def query_dim(self) -> int:
        return self.head_dim + self.value_dim if self.mla else self.head_dim

    @property
    def out_dim(self) -> int:
        return self.head_dim if self.mla else self.value_dim


class LayerPages(NamedTuple):
    """K and V pages of one layer, [num_pages, page_size, num_kv_heads, head_dim] each (NHD); where
    their dtype is not the model's, as `kv_format` says. Contiguous but for gaps between pages, of
    the same strides if of the same shape."""

    k: torch.Tensor
    v: torch.Tensor


class Fp8Pages(LayerPages):
    """Pages of fp8, and the scales of this layer's keys and values."""

    k_scale = v_scale = 1.0


def fp8_pages(k: torch.Tensor, v: torch.Tensor, k_scale: float, v_scale: float) -> Fp8Pages:
    """Return uint8 pages, the memory that is copied, as fp8 with these scales."""
    pages = Fp8Pages(k.view(FP8), v.view(FP8))
    pages.k_scale, pages.v_scale = k_scale, v_scale
    return pages


class LayerInputs(NamedTuple):
    """The inputs of one layer's attention.

    Attributes:
        query: [T, num_qo_heads, `layer.query_dim`], RoPE applied, contiguous.
        key, value: [T, num_kv_heads, head_dim], the new tokens' K/V, contiguous. Sequences that
            compute the same token may write the same slot: their K/V are equal but for rounding.
        pages: the layer's pages, updated in place.
        layer: one of the kinds that the backend was made for.
        sinks: [num_qo_heads] each head's score for an extra key whose value is 0, as in gpt-oss:
            attention whose weights sum to ``exp(lse)`` is multiplied by ``sigmoid(lse - sink)``.
        written: an earlier layer has written `key` and `value` into the pages.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: LayerPages
    layer: LayerKind
    sinks: torch.Tensor | None = None
    written: bool = False


class AttentionPlan(ABC):
    """A batch that a backend has planned, for all layers; valid until the backend's next plan.

    Attributes:
        arrays: the other arrays that `plan` was given, on the device, int32 or int64.
    """

    arrays: list[torch.Tensor]

    @abstractmethod
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        """Write the new tokens' K/V into the pages, unless they are `written`, then attend.

        Returns:
            [T, num_qo_heads, `layer.out_dim`], contiguous, the query's dtype.
        """


class TablesPlan(AttentionPlan):
    """Two plans of a step: for layers without a window, and for those with one."""

    def __init__(self, full: AttentionPlan, window: AttentionPlan) -> None:
        self.full, self.window, self.arrays = full, window, full.arrays

    def run(self, inputs: LayerInputs) -> torch.Tensor:
        return (self.full if inputs.layer.window is None else self.window).run(inputs)


class FixedShape(NamedTuple):
    """Sequences and new tokens of a batch for a CUDA graph."""

    sequences: int
    tokens: int


class AttentionBackend(ABC):
    """Plans the batches of one engine for one kind of attention kernels."""

    name: str
    """Name and version, for users."""

    room = "torch"
    """The folder of kernels that it is in: `choose_backend` takes the other kernels from there."""

    kv_dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.int8)
    """The dtypes of pages that it takes besides the model's."""

    reads_shared_once = False
    """Whether `PagedBatch.shared` makes a step faster."""

    looks_ahead: AttentionBackend | None = None
    """Plans the batches with `PagedBatch.ahead`; None: this backend itself."""

    max_fixed_rows = 0
    """The most sequences that `plan_fixed` takes; 0 if it cannot serve CUDA graphs."""

    max_fixed_tokens = 0
    """The most new tokens that `plan_fixed` takes in a batch with prefill; 0: decodes only."""

    def plan(self, batch: PagedBatch, *arrays: NDArray[np.integer]) -> AttentionPlan:
        """Prepare a step: index arrays on the device, masks, work split.

        Args:
            arrays: other arrays of the step, which go to the device in the same transfer.

        Raises:
            ValueError: a sequence has more new tokens than its pages hold, or shares its last page.
        """
        other = None if batch.ahead is None else self.looks_ahead
        return (other or self)._plan_tables(batch, arrays, None)

    def plan_fixed(self, batch: PagedBatch, *arrays: NDArray[np.integer]) -> AttentionPlan:
        """Plan a batch whose `run` a CUDA graph captures or replays.

        One graph serves batches that agree in these: how many sequences, how many new tokens,
        whether all are decodes, whether there are `shared` groups, and how long `arrays` are. Their
        `run` has the same launches and addresses, `AttentionPlan.arrays` included. The groups come
        first and have `cascade.MIN_ROWS` rows or more. A batch with prefill has none, and some of
        its sequences may have no new token.
        """
        shape = FixedShape(len(batch.query_lens), int(batch.qo_indptr[-1]))
        return self._plan_tables(batch, arrays, shape)

    def _plan_tables(
        self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None
    ) -> AttentionPlan:
        self._check_batch(batch)
        if batch.window is None:
            return self._plan(batch, arrays, fixed)
        self._check_batch(batch.window)
        return TablesPlan(self._plan(batch, arrays, fixed), self._plan(batch.window, (), fixed))

    def _check_batch(self, batch: PagedBatch) -> None:
        if (batch.query_lens > batch.kv_lens).any():
            raise ValueError("a sequence has more new tokens than its pages hold")
        for first, size, num_pages in batch.shared:
            if batch.kv_lens[first : first + size].min() <= num_pages * batch.page_size:
                raise ValueError("a shared prefix has the last page of a sequence")

    @abstractmethod
    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        """A plan for launches of this shape, or of whatever the batch has."""

    def compile_in_background(self) -> None:  # noqa: B027 - most have nothing more to compile
        """Begin to compile faster kernels; called once the backend is known to run."""

    def allocate_fixed(self, max_rows: int, max_indices: int) -> None:
        """Allocate the buffers of `plan_fixed` for so many sequences and page numbers."""
        raise NotImplementedError

    def fixed_bytes(self, sizes: Sequence[int], max_indices: int) -> int:
        """Bytes on the device that `plan_fixed` needs for batches of these sizes."""
        raise NotImplementedError
