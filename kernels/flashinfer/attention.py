"""Attention over pages with FlashInfer's kernels, on NVIDIA GPUs.

A step's decodes (one new token each) come first in its batch and go to the decode kernel. The other
rows go to one causal prefill over pages, whose alignment at the bottom right is what a suffix after
a cached prefix needs, or over the new tokens alone if none of them has a cached prefix. In CUDA
graphs of steps with prefill, that kernel takes all rows.

Where decodes share a prefix (`PagedBatch.shared`), a cascade of two levels reads it once for each
group: all its queries over the shared pages, each query over the pages of its own, then a merge of
the two states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import (
    Arrays,
    AttentionBackend,
    AttentionPlan,
    FixedShape,
    LayerKind,
    PagedBatch,
)
from radixcache.kernels.cascade import split_levels
from radixcache.kernels.flashinfer.plan import FlashInferPlan, Part, Tables, Use, flashinfer
from radixcache.kernels.flashinfer.wrappers import (
    MAX_FIXED_ROWS,
    MAX_FIXED_SEQUENCES,
    MAX_FIXED_TOKENS,
    WRAPPER_BYTES,
    FindPrefill,
    Wrappers,
    max_groups,
)
from radixcache.kernels.kv_format import FP8
from radixcache.kernels.upload import Staged, StepUploads

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)


class FlashInferAttention(AttentionBackend):
    """`AttentionBackend` for float16 and bfloat16 on an NVIDIA GPU.

    Args:
        kinds: every kind of layer that the model has.
        kv_dtype: of the pages: `dtype`, or fp8. fp8 is read by fa2 alone, and from pages alone: a
            fresh prompt would else attend over what is not rounded, and a hit over what is.
        find_short_prefill: see `Wrappers`.

    Raises:
        ValueError: FlashInfer has no kernel for this dtype or these layers.
    """

    name, room = f"FlashInfer {flashinfer.__version__}", "flashinfer"
    kv_dtypes: tuple[torch.dtype, ...] = ()
    max_fixed_rows = MAX_FIXED_ROWS
    max_fixed_tokens = MAX_FIXED_TOKENS

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kinds: Sequence[LayerKind],
        kv_dtype: torch.dtype | None = None,
        find_short_prefill: FindPrefill = lambda *_: None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"it computes in float16 and bfloat16, not {dtype}")
        for kind in kinds:
            self._check(kind)
        self.device, self.dtype, self._kv_dtype = device, dtype, kv_dtype or dtype
        if kv_dtype == FP8:
            self.kv_dtypes, self.name = (FP8,), f"{self.name} over fp8"
        self._kinds = list(dict.fromkeys(kinds))
        # A window hides another part of the shared prefix from each row; and the kernel that
        # merges two states has at most 1,024 threads with eight elements each.
        self.reads_shared_once = all(
            kind.window is None and not kind.mla and kind.query_heads * kind.head_dim <= 8 * 1024
            for kind in kinds
        )
        self._uploads = StepUploads(device)
        self._window_uploads = StepUploads(device)  # of the tables of layers with a window
        self._fixed_in_group: dict[int, torch.Tensor] = {}
        self._wrappers = Wrappers(device, dtype, self._kinds, self._kv_dtype, find_short_prefill)

    def compile_in_background(self) -> None:
        self._wrappers.compile_in_background()

    def _check(self, kind: LayerKind) -> None:
        if kind.head_dim not in HEAD_DIMS or kind.value_dim != kind.head_dim:
            raise ValueError(f"it has no kernel for heads of {kind.head_dim}/{kind.value_dim}")

    @torch.inference_mode()
    def allocate_fixed(self, max_rows: int, max_indices: int) -> None:
        assert max_rows <= self.max_fixed_rows
        indices = self._wrappers.fixed_indices
        if indices:  # of another engine, whose graphs read these buffers
            if len(indices[False, "shared"]) < max_indices:
                raise ValueError(f"room was made for fewer page numbers than {max_indices}")
            return
        windowed = any(kind.window is not None for kind in self._kinds)
        for uploads in (self._uploads, self._window_uploads)[: 1 + windowed]:
            uploads.allocate_fixed(_upload_capacity(max_rows, max_indices))
        self._wrappers.allocate_fixed(max_indices, windowed)

    def fixed_bytes(self, sizes: Sequence[int], max_indices: int) -> int:
        uses = 2 + self.reads_shared_once
        int32s = _upload_capacity(max(sizes), max_indices) + 2 * max_indices
        return uses * len(self._kinds) * WRAPPER_BYTES + 4 * int32s

    @torch.inference_mode()  # what is written here may be written again inside of it
    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        decodes, total = batch.num_decodes, len(batch.query_lens)
        if fixed and decodes < total:
            assert fixed.sequences <= MAX_FIXED_SEQUENCES and fixed.tokens <= self.max_fixed_tokens
            assert not batch.shared
            decodes = 0  # how many there are changes from batch to batch: all rows are prefill
        levels = None
        if batch.shared:
            levels = split_levels(batch, max_groups(decodes) if fixed else None)
        own = batch if levels is None else levels.own
        subs: list[tuple[Use, PagedBatch]] = []
        if decodes:
            subs.append(("decode", own.rows(0, decodes)))
        if decodes < total:
            rest = own.rows(decodes, total)
            plain = self._kv_dtype == self.dtype and not fixed
            fresh = plain and bool((rest.query_lens == rest.kv_lens).all())
            subs.append(("ragged" if fresh else "prefill", rest))
        if levels is not None:
            subs.append(("shared", levels.shared))
        # What has a fixed length goes first, so that it keeps its address.
        staging: list[NDArray[np.integer]] = [*arrays]
        if levels is not None:
            staging.append(levels.in_group)
        staging += [array for _, sub in subs for array in _fixed_arrays(sub)]
        for _, sub in subs:
            staging += [sub.kv_indices, *([] if sub.write_indices is None else [sub.write_indices])]
        uploads = self._uploads if batch.first is None else self._window_uploads
        with uploads.stage(staging, fixed is not None) as staged:
            return self._plan_staged(batch, subs, len(arrays), iter(staged), fixed)

    def _plan_staged(
        self,
        batch: PagedBatch,
        subs: Sequence[tuple[Use, PagedBatch]],
        num_arrays: int,
        staged: Iterator[Staged],
        fixed: FixedShape | None,
    ) -> FlashInferPlan:
        """Plan the parts `subs` of a step, whose arrays come in the order of `_plan`."""
        cascade = bool(batch.shared)
        given = [next(staged).device for _ in range(num_arrays)]
        in_group = self._bytes(next(staged).device, fixed) if cascade else None
        tables = [[*islice(staged, len(Tables._fields) - 2)] for _ in subs]
        parts: list[Part] = []
        end = 0
        for (use, sub), arrays_of_sub in zip(subs, tables, strict=True):
            first = 0 if use == "shared" else end
            end = first + int(sub.qo_indptr[-1])
            indices = next(staged)
            to = indices if sub.write_indices is None else next(staged)
            part = Part(use, slice(first, end), Tables(indices, to, *arrays_of_sub), {})
            for kind in filter(batch.serves, self._kinds):
                part.wrappers[kind] = self._wrappers.planned(part, kind, batch, fixed)
            parts.append(part)
        shared = parts.pop() if cascade else None
        return FlashInferPlan(given, parts, shared, in_group)

    def _bytes(self, flags: torch.Tensor, fixed: FixedShape | None) -> torch.Tensor:
        """`flags` as uint8, for a fixed shape at an address of their own."""
        if fixed is None:
            return flags.byte()
        size = len(flags)
        if size not in self._fixed_in_group:
            self._fixed_in_group[size] = flags.byte()
        return self._fixed_in_group[size].copy_(flags)


def _upload_capacity(max_rows: int, max_indices: int) -> int:
    """int32s of the uploaded arrays of a batch: decodes on both levels, or with prefill."""
    return 2 * max_indices + 24 * (max(max_rows, MAX_FIXED_TOKENS) + 4)


def _fixed_arrays(batch: PagedBatch) -> list[NDArray[np.integer]]:
    """The fields of `Tables` whose lengths depend only on the numbers of sequences and tokens: all
    but the page numbers."""
    sequence = np.arange(len(batch.query_lens))
    if batch.num_decodes < len(sequence):
        sequence = np.repeat(sequence, batch.query_lens)
    lengths = (batch.kv_last_page_len, batch.kv_lens)
    return [batch.qo_indptr, batch.kv_indptr, *lengths, sequence, batch.positions]
