"""Attention over pages with Triton, where FlashInfer does not run: NVIDIA without nvcc, AMD, Intel.

Decodes split their keys into a fixed number of parts, whose size depends only on the row's own
length, and merge them (split KV, as in FlashDecoding). Prompts and suffixes go through one causal
kernel over pages. Blocks of keys begin at fixed positions, and nothing is added atomically: **a
row's result does not depend on the rest of the batch**, for one kind of launch (decode or prefill).

Its arithmetic is tested on a CPU by Triton's interpreter, and its code is compiled ahead for
sm_80, sm_90 and gfx942 (`make test-gpu`). An H100 has run it (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixcache.kernels.attention import (
    Arrays,
    AttentionBackend,
    AttentionPlan,
    FixedShape,
    LayerInputs,
    LayerKind,
    PagedBatch,
)
from radixcache.kernels.upload import StepUploads

MAX_FIXED_ROWS, MAX_FIXED_TOKENS = 288, 512
"""The most decodes, and the most new tokens with prefill, of a batch for `plan_fixed`."""

SPLITS = 16
"""Parts of a decode's keys; with 8 KV heads, one row fills a GPU of 128 processors."""
MIN_SPLIT = 256  # keys


INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Python, on CPU tensors, as in tests."""

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class TritonBackend(AttentionBackend):
    """`AttentionBackend` for float32, float16 and bfloat16, any head size and page size."""

    name = f"Triton {triton.__version__}"

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
        parts = max(k.query_heads * (k.value_dim + 1) * SPLITS for k in self._kinds)
        return 4 * (max(sizes) * parts + _capacity(max(sizes), max_indices))

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
        query, key, value, (k_pages, v_pages), layer, sinks = inputs
        heads, kv_heads, dim, value_dim, scale, window, softcap, _ = layer
        tokens = len(query)
        out = query.new_empty(tokens, heads, value_dim)
        strides = (*k_pages.stride()[:3], *v_pages.stride()[:3])
        starts = (k_pages.data_ptr(), v_pages.data_ptr())
        new = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
        sizes = {"DIM": dim, "DIM_2": _power(dim), "VALUE": value_dim, "VALUE_2": _power(value_dim)}
        _append[tokens, kv_heads](
            key, value, k_pages, v_pages, self.slots, *new, *strides, PAGE=self.page_size, **sizes
        )
        group, exact = heads // kv_heads, query.dtype == torch.float32
        block = block_of(max(sizes["DIM_2"], sizes["VALUE_2"]), query.dtype)
        tables = (self.kv_indptr, self.kv_indices, self.kv_lens)
        pages = (k_pages, v_pages, *tables, query.stride(0), query.stride(1), *strides)
        sink = (query, False) if sinks is None else (sinks.float(), True)
        common = {
            "scale": scale, "window": window or 0, "softcap": softcap or 0.0,
            "WINDOW": window is not None, "SOFTCAP": softcap is not None,
            # Of all heads in these pages, in bytes: how many a load may take at once.
            "ALIGN": math.gcd(16, *starts, *(stride * k_pages.itemsize for stride in strides)),
            "PAGE": self.page_size, "GROUP": group, "BLOCK": block, "EXACT": exact,
            # The interpreter multiplies the bits of bfloat16 as integers.
            "UPCAST": INTERPRETED and query.dtype == torch.bfloat16, **sizes,
        }  # fmt: skip
        if self.decodes:
            parts = query.new_empty(self.decodes, heads, SPLITS, value_dim, dtype=torch.float32)
            sums = parts.new_empty(self.decodes, heads, SPLITS)
            rows = max(16, triton.next_power_of_2(group))
            _decode[self.decodes, kv_heads, SPLITS](
                query, parts, sums, *pages, **common, ROWS=rows, SPLITS=SPLITS, MIN_SPLIT=MIN_SPLIT
            )
            _merge[self.decodes, heads](
                parts, sums, out, *sink, SPLITS=SPLITS, VALUE=value_dim, VALUE_2=sizes["VALUE_2"]
            )
        if self.longest:
            tiles = triton.cdiv(self.longest * group, block)
            _prefill[self.sequences - self.decodes, kv_heads, tiles](
                query, out, self.qo_indptr, *pages, self.decodes, *sink, **common, ROWS=block
            )
        return out


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # which products take


def block_of(dim: int, dtype: torch.dtype, amd: bool = torch.version.hip is not None) -> int:
    """Keys per block, and query heads times tokens per prefill tile: as many as fit into shared
    memory together with the blocks in flight (NVIDIA 163 KiB or more, AMD 64)."""
    return max(16, 64 >> (dtype == torch.float32) + (dim > 256) + (amd and dim > 128))


def _capacity(max_rows: int, max_indices: int) -> int:
    """int32s for token ids, positions, rows, four tables and the page numbers, each aligned."""
    return 8 * (max(max_rows, MAX_FIXED_TOKENS) + 8) + max_indices


@triton.jit
def _append(
    key, value, k_pages, v_pages, slots, key_row, key_head, value_row, value_head,
    k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
    DIM: tl.constexpr, DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr,
):  # fmt: skip
    """Write one token's K and V of one head to its slot."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(slots + row).to(tl.int64)
    k_at, v_at = at // PAGE * k_page + at % PAGE * k_slot, at // PAGE * v_page + at % PAGE * v_slot
    _store(k_pages + k_at + head * k_head, key + row * key_row + head * key_head, DIM, DIM_2)
    _store(v_pages + v_at + head * v_head, value + row * value_row + head * value_head,
           VALUE, VALUE_2)  # fmt: skip


@triton.jit
def _store(to, head, DIM: tl.constexpr, DIM_2: tl.constexpr):
    """Write a head as pages hold it: see `kv_format.encode`."""
    d = tl.arange(0, DIM_2)
    x = tl.load(head + d, mask=d < DIM, other=0.0)
    if to.dtype.element_ty == tl.int8:
        x, b = tl.reshape(x.to(tl.float32), (DIM_2 // 32, 32)), tl.arange(0, DIM_2 // 32)
        # As integers, a NaN is the largest.
        most = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        scale = (most / 127).to(tl.float16)
        factor = tl.where(scale == 0, 0.0, 1 / scale.to(tl.float32))
        x = tl.minimum(tl.maximum(x * factor[:, None], -127.0), 127.0)
        x = x + 12582912.0 - 12582912.0  # to the nearest, ties to even
        tl.store((to + DIM).to(tl.pointer_type(tl.float16)) + b, scale, mask=b < DIM // 32)
        x = tl.reshape(x, (DIM_2,))
    tl.store(to + d, x.to(to.dtype.element_ty), mask=d < DIM)


@triton.jit
def _load(pages, at, there, DIM: tl.constexpr, DIM_2: tl.constexpr, ALIGN: tl.constexpr):
    """The numbers [m, DIM_2] of stored heads [m, 1], at multiples of ALIGN bytes."""
    heads, d = tl.multiple_of(pages + at, (ALIGN, ALIGN)), tl.arange(0, DIM_2)[None, :]
    if heads.dtype.element_ty == tl.int8:
        numbers = tl.load(heads + d, mask=there & (d < DIM), other=0).to(tl.float32)
        if ALIGN % 4 == 0 and DIM % 64 == 0:  # two scales at once: 4 bytes can be loaded ahead
            b = tl.arange(0, DIM_2 // 64)[None, :]
            pairs = tl.multiple_of((heads + DIM).to(tl.pointer_type(tl.int32)), (ALIGN, ALIGN))
            pairs = tl.load(pairs + b, mask=there & (b < DIM // 64), other=0)
            scales = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
            scales = tl.reshape(scales, (heads.shape[0], DIM_2 // 32)).to(tl.float16, bitcast=True)
        else:
            b = tl.arange(0, DIM_2 // 32)[None, :]
            scales = (heads + DIM).to(tl.pointer_type(tl.float16)) + b
            scales = tl.load(scales, mask=there & (b < DIM // 32), other=0.0)
        shape: tl.constexpr = (heads.shape[0], DIM_2 // 32, 32)
        scales = tl.broadcast_to(scales.to(tl.float32)[:, :, None], shape)
        return numbers * tl.reshape(scales, numbers.shape)
    else:
        return tl.load(heads + d, mask=there & (d < DIM), other=0.0)


@triton.jit
def _attend_block(
    q, best, total, mixed, begin, stop, low, high, k_pages, v_pages, table, k_page, k_slot, v_page,
    v_slot, scale, softcap, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr, UPCAST: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, begin + BLOCK), of which a row sees [low, high]."""
    at = begin + tl.arange(0, BLOCK)
    there = at < stop
    page = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
    k_at, v_at = page * k_page + at % PAGE * k_slot, page * v_page + at % PAGE * v_slot
    if UPCAST:
        q = q.to(tl.float32)
    keys = _load(k_pages, k_at[:, None], there[:, None], DIM, DIM_2, ALIGN).to(q.dtype)
    values = _load(v_pages, v_at[:, None], there[:, None], VALUE, VALUE_2, ALIGN).to(q.dtype)
    if EXACT:  # not TF32
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    else:
        scores = tl.dot(q, tl.trans(keys)) * scale
    if SOFTCAP:
        decay = tl.exp(-2 * tl.abs(scores) / softcap)
        tanh = (1 - decay) / (1 + decay)
        scores = softcap * tl.where(scores < 0, -tanh, tanh)
    seen = (at[None, :] >= low[:, None]) & (at[None, :] <= high[:, None])
    scores = tl.where(seen, scores * LOG2_E, -float("inf"))
    most = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(most == -float("inf"), 0.0, most)
    weights, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    if EXACT:
        more = tl.dot(weights, values, input_precision="ieee")
    else:
        more = tl.dot(weights.to(values.dtype), values)
    return most, total, mixed * shrink[:, None] + more


@triton.jit
def _decode(
    query, parts, sums, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, query_row, query_head,
    k_page, k_slot, k_head, v_page, v_slot, v_head, scale, window, softcap, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr, UPCAST: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """One token's query heads of one KV head, over one part of its keys."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    start = 0
    if WINDOW:
        start = tl.maximum(length - window, 0) // BLOCK * BLOCK
    size = tl.maximum(tl.cdiv(tl.cdiv(length - start, SPLITS), BLOCK) * BLOCK, MIN_SPLIT)
    first = start + split * size
    stop = tl.minimum(first + size, length)
    r, d, v = tl.arange(0, ROWS), tl.arange(0, DIM_2), tl.arange(0, VALUE_2)
    head = kv_head * GROUP + r
    part = (row * tl.num_programs(1) * GROUP + head) * SPLITS + split
    lse = tl.full((ROWS,), -float("inf"), tl.float32)
    if first < stop:
        q_at = query + row * query_row + head[:, None] * query_head + d[None, :]
        q = tl.load(q_at, mask=(r < GROUP)[:, None] & (d < DIM)[None, :], other=0.0)
        low = tl.zeros((ROWS,), tl.int32)
        if WINDOW:
            low += tl.maximum(length - window, 0)
        high = tl.zeros((ROWS,), tl.int32) + length - 1
        best = tl.full((ROWS,), -float("inf"), tl.float32)
        total, mixed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VALUE_2), tl.float32)
        table = kv_indices + tl.load(kv_indptr + row)
        for begin in range(first, stop, BLOCK):
            best, total, mixed = _attend_block(
                q, best, total, mixed, begin, stop, low, high, k_pages + kv_head * k_head,
                v_pages + kv_head * v_head, table, k_page, k_slot, v_page, v_slot, scale, softcap,
                SOFTCAP, PAGE, BLOCK, EXACT, UPCAST, ALIGN, DIM, DIM_2, VALUE, VALUE_2,
            )  # fmt: skip
        out_mask = (r < GROUP)[:, None] & (v < VALUE)[None, :]
        tl.store(parts + part[:, None] * VALUE + v[None, :], mixed / total[:, None], mask=out_mask)
        lse = best + tl.log2(total)
    tl.store(sums + part, lse, mask=r < GROUP)


@triton.jit
def _merge(
    parts, sums, out, sinks, SINKS: tl.constexpr, SPLITS: tl.constexpr, VALUE: tl.constexpr,
    VALUE_2: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head, weighted by their sums."""
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    s, v = tl.arange(0, SPLITS), tl.arange(0, VALUE_2)
    lse = tl.load(sums + at * SPLITS + s)
    most = tl.max(lse, 0)
    weights = tl.exp2(lse - most)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + tl.program_id(1)) * LOG2_E - most)
    weights /= total
    part = parts + (at * SPLITS + s)[:, None] * VALUE + v[None, :]
    there = (lse > -float("inf"))[:, None] & (v < VALUE)[None, :]
    mixed = tl.load(part, mask=there, other=0.0)
    result = tl.sum(weights[:, None] * mixed, 0)
    tl.store(out + at * VALUE + v, result.to(out.dtype.element_ty), mask=v < VALUE)


@triton.jit
def _prefill(
    query, out, qo_indptr, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, query_row, query_head,
    k_page, k_slot, k_head, v_page, v_slot, v_head, first_sequence, sinks, SINKS: tl.constexpr,
    scale, window, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, UPCAST: tl.constexpr,
    ALIGN: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr, VALUE: tl.constexpr,
    VALUE_2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of a sequence's last tokens times query heads of one KV head, causal."""
    sequence, kv_head = first_sequence + tl.program_id(0), tl.program_id(1)
    first_token = tl.load(qo_indptr + sequence)
    count = tl.load(qo_indptr + sequence + 1) - first_token
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) * ROWS < count * GROUP:
        length = tl.load(kv_lens + sequence)
        token, head = r // GROUP, kv_head * GROUP + r % GROUP
        mine = token < count
        d, v = tl.arange(0, DIM_2), tl.arange(0, VALUE_2)
        row = (first_token + token).to(tl.int64)
        q_at = query + row[:, None] * query_row + head[:, None] * query_head + d[None, :]
        q = tl.load(q_at, mask=mine[:, None] & (d < DIM)[None, :], other=0.0)
        high = tl.where(mine, length - count + token, -1)
        low = tl.zeros((ROWS,), tl.int32)
        start = 0
        if WINDOW:
            low = tl.maximum(high - window + 1, 0)
            first_high = length - count + tl.program_id(2) * ROWS // GROUP
            start = tl.maximum(first_high - window + 1, 0) // BLOCK * BLOCK
        stop = tl.max(high) + 1
        best = tl.full((ROWS,), -float("inf"), tl.float32)
        total, mixed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VALUE_2), tl.float32)
        table = kv_indices + tl.load(kv_indptr + sequence)
        for begin in range(start, stop, BLOCK):
            best, total, mixed = _attend_block(
                q, best, total, mixed, begin, stop, low, high, k_pages + kv_head * k_head,
                v_pages + kv_head * v_head, table, k_page, k_slot, v_page, v_slot, scale, softcap,
                SOFTCAP, PAGE, BLOCK, EXACT, UPCAST, ALIGN, DIM, DIM_2, VALUE, VALUE_2,
            )  # fmt: skip
        if SINKS:
            total += tl.exp2(tl.load(sinks + head, mask=mine, other=0.0) * LOG2_E - best)
        mixed /= tl.where(mine, total, 1.0)[:, None]
        heads = tl.num_programs(1) * GROUP
        target = out + (row * heads + head)[:, None] * VALUE + v[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=mine[:, None] & (v < VALUE)[None, :])
