"""Attention over pages with Triton, where FlashInfer does not run: NVIDIA without nvcc, AMD, Intel.

Decodes split their keys into a fixed number of parts, whose size depends only on the row's own
length, and merge them. Prompts and suffixes go through one causal kernel over pages. Blocks of keys
begin at fixed positions, and nothing is added atomically: **a row's result does not depend on the
rest of the batch**, for one kind of launch (decode, or prefill by `splits_of` its tokens).

Its arithmetic is tested on a CPU by Triton's interpreter, and its code is compiled ahead for
sm_80, sm_90 and gfx942 (`make test-gpu`). An H200 has run it (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from radixcache.kernels.attention import (
    Arrays,
    AttentionBackend,
    AttentionPlan,
    FixedShape,
    LayerInputs,
    LayerKind,
    PagedBatch,
)
from radixcache.kernels.triton.attention_kernels import append_kernel, decode_kernel
from radixcache.kernels.triton.prefill import (
    INTERPRETED,
    MIN_SPLIT,
    SPLIT_TOKENS,
    TritonPrefill,
    allocate_parts,
    constants,
    merge,
    parts_bytes,
    strides,
)
from radixcache.kernels.upload import StepUploads

MAX_FIXED_ROWS, MAX_FIXED_TOKENS = 288, SPLIT_TOKENS
"""The most decodes, and the most new tokens with prefill, of a batch for `plan_fixed`."""

SPLITS = 16
"""Parts of a decode's keys; with 8 KV heads, one row fills a GPU of 128 processors."""


class TritonAttention(AttentionBackend):
    """`AttentionBackend` for float32, float16 and bfloat16, any head size and page size."""

    name, room = f"Triton {triton.__version__}", "triton"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
    ) -> None:
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError("it computes on a CPU in the interpreter alone")
        if any(kind.mla for kind in kinds):
            raise ValueError("it has no kernel for MLA")
        if device.type == "cuda":
            self.max_fixed_rows, self.max_fixed_tokens = MAX_FIXED_ROWS, MAX_FIXED_TOKENS
        self._kinds, self._uploads = list(dict.fromkeys(kinds)), StepUploads(device)
        self._window_uploads = StepUploads(device)

    def allocate_fixed(self, max_rows: int, max_indices: int) -> None:
        for uploads in (self._uploads, self._window_uploads):
            uploads.allocate_fixed(_capacity(max_rows, max_indices))

    def fixed_bytes(self, sizes: Sequence[int], max_indices: int) -> int:
        decodes = max(4 * k.query_heads * (k.value_dim + 1) * SPLITS for k in self._kinds)
        parts = max(max(sizes) * decodes, *map(parts_bytes, self._kinds))
        return parts + 4 * _capacity(max(sizes), max_indices)

    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        queries, lens, decodes = batch.query_lens, batch.kv_lens, batch.num_decodes
        if fixed and decodes < len(queries):
            decodes = 0  # how many there are changes from batch to batch: all rows are prefill
        tables = (batch.qo_indptr, batch.kv_indptr, lens, batch.slots(), batch.kv_indices)
        uploads = self._uploads if batch.first is None else self._window_uploads
        with uploads.stage([*arrays, *tables], fixed is not None) as staged:
            *given, qo_indptr, kv_indptr, kv_lens, slots, kv_indices = (
                one.device for one in staged
            )
        longest = int(queries[decodes:].max(initial=0))
        if fixed and longest:
            longest = fixed.tokens  # as long as one may be
        return TritonPlan(
            given, qo_indptr, kv_indptr, kv_lens, slots, kv_indices, batch.page_size, len(queries),
            decodes, longest,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonPlan(AttentionPlan):
    """Index arrays on the device (int32), and the sizes of the launches."""

    arrays: list[torch.Tensor]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    kv_indices: torch.Tensor
    page_size: int
    sequences: int
    decodes: int
    """Leading sequences that go to the decode kernel; the others go to the prefill kernel."""
    longest: int
    """The most new tokens of a sequence in the prefill kernel; in a graph, of all tokens."""

    @torch.inference_mode()
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        query, key, value, pages, layer, sinks, written = inputs
        known = constants(layer, self.page_size, query, pages)
        out = query.new_empty(len(query), layer.query_heads, layer.value_dim)
        at = strides(query, pages)
        if not written:
            new = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
            sizes = {name: known[name] for name in ("PAGE", "DIM", "DIM_2", "VALUE", "VALUE_2")}
            append_kernel[len(query), layer.kv_heads](
                key, value, *pages, self.slots, *new, *at[2:], **sizes
            )
        tables = (self.kv_indptr, self.kv_indices, self.kv_lens)
        if self.decodes:
            parts, sums = allocate_parts(query[: self.decodes], layer, SPLITS)
            rows = max(16, triton.next_power_of_2(known["GROUP"]))
            decode_kernel[self.decodes, layer.kv_heads, SPLITS](
                query, parts, sums, *pages, *tables, *at, **known, ROWS=rows, SPLITS=SPLITS,
                MIN_SPLIT=MIN_SPLIT,
            )  # fmt: skip
            sink = (query, False) if sinks is None else (sinks.float(), True)
            merge(parts, sums, out, sink)
        if self.longest:
            prefill = TritonPrefill(
                layer, self.page_size, self.qo_indptr, *tables, self.decodes, self.sequences,
                self.longest,
            )  # fmt: skip
            prefill.run(query, pages, out=out, sinks=sinks)
        return out


def _capacity(max_rows: int, max_indices: int) -> int:
    """int32s for token ids, positions, rows, four tables and the page numbers, each aligned."""
    return 8 * (max(max_rows, MAX_FIXED_TOKENS) + 8) + max_indices
