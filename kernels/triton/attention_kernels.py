"""Triton's kernels for attention over pages.

The keys of a decode or of a short prefill are split into parts, which are weighed by their sums
(split KV, as in FlashDecoding). Most blocks need no mask, because all rows see them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def append_kernel(
    key, value, k_pages, v_pages, slots, key_row, key_head, value_row, value_head,
    k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
    DIM: tl.constexpr, DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr,
):  # fmt: skip
    """Write one token's K and V of one head to its slot: see `kv_format.isolate`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(slots + row).to(tl.int64)
    k_at, v_at = at // PAGE * k_page + at % PAGE * k_slot, at // PAGE * v_page + at % PAGE * v_slot
    d, e = tl.arange(0, DIM_2), tl.arange(0, VALUE_2)
    k = tl.load(key + row * key_row + head * key_head + d, mask=d < DIM, other=0.0)
    v = tl.load(value + row * value_row + head * value_head + e, mask=e < VALUE, other=0.0)
    finite = _fits(k, k_pages) & _fits(v, v_pages)
    k, v = tl.where(finite, k.to(tl.float32), float("nan")), tl.where(finite, v.to(tl.float32), 0.0)
    _store(k_pages + k_at + head * k_head, k, DIM, DIM_2)
    _store(v_pages + v_at + head * v_head, v, VALUE, VALUE_2)


@triton.jit
def _fits(x, pages):
    """Whether pages hold `x` as finite numbers."""
    if pages.dtype.element_ty == tl.int8:
        held = (x.to(tl.float32) / 127).to(tl.float16)  # a scale
    else:
        held = x.to(pages.dtype.element_ty)
    return tl.min((tl.abs(held.to(tl.float32)) < float("inf")).to(tl.int32), 0) == 1


@triton.jit
def _store(to, x, DIM: tl.constexpr, DIM_2: tl.constexpr):
    """Write a head [DIM_2], float32, as pages hold it: see `kv_format.encode`."""
    d = tl.arange(0, DIM_2)
    if to.dtype.element_ty == tl.int8:
        x, b = tl.reshape(x, (DIM_2 // 32, 32)), tl.arange(0, DIM_2 // 32)
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
def _load(
    pages, at, there, MASKED: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    DIM_2: tl.constexpr,
):  # fmt: skip
    """The numbers [m, DIM_2] of stored heads [m, 1], at multiples of ALIGN bytes; if MASKED, of
    those that are `there`."""
    heads, d = tl.multiple_of(pages + at, (ALIGN, ALIGN)), tl.arange(0, DIM_2)[None, :]
    mask = d < DIM
    if MASKED:
        mask = there & mask
    if heads.dtype.element_ty == tl.int8:
        numbers = tl.load(heads + d, mask=mask, other=0).to(tl.float32)
        if ALIGN % 4 == 0 and DIM % 64 == 0:  # two scales at once: 4 bytes can be loaded ahead
            b = tl.arange(0, DIM_2 // 64)[None, :]
            mask = b < DIM // 64
            if MASKED:
                mask = there & mask
            pairs = tl.multiple_of((heads + DIM).to(tl.pointer_type(tl.int32)), (ALIGN, ALIGN))
            pairs = tl.load(pairs + b, mask=mask, other=0)
            scales = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
            scales = tl.reshape(scales, (heads.shape[0], DIM_2 // 32)).to(tl.float16, bitcast=True)
        else:
            b = tl.arange(0, DIM_2 // 32)[None, :]
            mask = b < DIM // 32
            if MASKED:
                mask = there & mask
            scales = (heads + DIM).to(tl.pointer_type(tl.float16)) + b
            scales = tl.load(scales, mask=mask, other=0.0)
        shape: tl.constexpr = (heads.shape[0], DIM_2 // 32, 32)
        scales = tl.broadcast_to(scales.to(tl.float32)[:, :, None], shape)
        return numbers * tl.reshape(scales, numbers.shape)
    else:
        return tl.load(heads + d, mask=mask, other=0.0)


@triton.jit
def _attend_block(
    q, best, total, mixed, begin, stop, low, high, k_pages, v_pages, table, k_page, k_slot, v_page,
    v_slot, scale, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr, UPCAST: tl.constexpr, ALIGN: tl.constexpr,
    DIM: tl.constexpr, DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, begin + BLOCK), of which a row sees [low, high]; without
    MASKED every row sees all of them."""
    at = begin + tl.arange(0, BLOCK)
    there = at < stop
    if MASKED:
        page = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
    else:
        page = tl.load(table + at // PAGE).to(tl.int64)
    k_at = page * k_page + at % PAGE * k_slot
    v_at = k_at  # both sides have the same strides, if the same shape
    if VALUE != DIM:
        v_at = page * v_page + at % PAGE * v_slot
    if UPCAST:
        q = q.to(tl.float32)
    there = there[:, None]
    keys = _load(k_pages, k_at[:, None], there, MASKED, ALIGN, DIM, DIM_2).to(q.dtype)
    values = _load(v_pages, v_at[:, None], there, MASKED, ALIGN, VALUE, VALUE_2).to(q.dtype)
    if EXACT:  # not TF32
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(keys))
    if SOFTCAP:
        scores *= scale
        decay = tl.exp(-2 * tl.abs(scores) / softcap)
        tanh = (1 - decay) / (1 + decay)
        scores = softcap * LOG2_E * tl.where(scores < 0, -tanh, tanh)
    else:
        scores *= scale * LOG2_E
    if MASKED:
        seen = (at[None, :] >= low[:, None]) & (at[None, :] <= high[:, None])
        scores = tl.where(seen, scores, -float("inf"))
    most = tl.maximum(best, tl.max(scores, 1))
    safe = most
    if MASKED:
        safe = tl.where(most == -float("inf"), 0.0, most)
    weights, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    mixed *= shrink[:, None]
    if EXACT:
        mixed += tl.dot(weights, values, input_precision="ieee")
    else:
        mixed = tl.dot(weights.to(values.dtype), values, mixed)
    return most, total, mixed


@triton.jit
def _attend(
    q, best, total, mixed, begin, free, stop, low, high, k_pages, v_pages, table, k_page, k_slot,
    v_page, v_slot, scale, softcap, FREE: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr, UPCAST: tl.constexpr, ALIGN: tl.constexpr,
    DIM: tl.constexpr, DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr,
):  # fmt: skip
    """The keys [begin, stop); with FREE, every row sees those before `free`, which are whole
    blocks, and a few blocks are left, for which no pipeline is filled."""
    if FREE:
        for at in range(begin, free, BLOCK):
            best, total, mixed = _attend_block(
                q, best, total, mixed, at, stop, low, high, k_pages, v_pages, table, k_page, k_slot,
                v_page, v_slot, scale, softcap, False, SOFTCAP, PAGE, BLOCK, EXACT, UPCAST, ALIGN,
                DIM, DIM_2, VALUE, VALUE_2,
            )  # fmt: skip
        begin = free
    for at in tl.range(begin, stop, BLOCK, num_stages=1 if FREE else None):
        best, total, mixed = _attend_block(
            q, best, total, mixed, at, stop, low, high, k_pages, v_pages, table, k_page, k_slot,
            v_page, v_slot, scale, softcap, True, SOFTCAP, PAGE, BLOCK, EXACT, UPCAST, ALIGN, DIM,
            DIM_2, VALUE, VALUE_2,
        )  # fmt: skip
    return best, total, mixed


@triton.jit
def decode_kernel(
    query, parts, sums, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, query_row, query_head,
    k_page, k_slot, k_head, v_page, v_slot, v_head, scale, window, softcap, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr, UPCAST: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    DIM_2: tl.constexpr, VALUE: tl.constexpr, VALUE_2: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """One token's query heads of one KV head, over one part of its keys."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
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
        best, total, mixed = _attend(
            q, best, total, mixed, first, 0, stop, low, high, k_pages + kv_head * k_head,
            v_pages + kv_head * v_head, table, k_page, k_slot, v_page, v_slot, scale, softcap,
            False, SOFTCAP, PAGE, BLOCK, EXACT, UPCAST, ALIGN, DIM, DIM_2, VALUE, VALUE_2,
        )  # fmt: skip
        out_mask = (r < GROUP)[:, None] & (v < VALUE)[None, :]
        tl.store(parts + part[:, None] * VALUE + v[None, :], mixed / total[:, None], mask=out_mask)
        lse = best + tl.log2(total)
    tl.store(sums + part, lse, mask=r < GROUP)


@triton.jit
def merge_kernel(
    parts, sums, out, lse, sinks, SINKS: tl.constexpr, LSE: tl.constexpr, SPLITS: tl.constexpr,
    VALUE: tl.constexpr, VALUE_2: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head, weighted by their sums."""
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    s, v = tl.arange(0, SPLITS), tl.arange(0, VALUE_2)
    logs = tl.load(sums + at * SPLITS + s)
    most = tl.max(logs, 0)
    weights = tl.exp2(logs - most)
    total = tl.sum(weights, 0)
    if LSE:
        tl.store(lse + at, most + tl.log2(total))
    if SINKS:
        total += tl.exp2(tl.load(sinks + tl.program_id(1)) * LOG2_E - most)
    weights /= total
    part = parts + (at * SPLITS + s)[:, None] * VALUE + v[None, :]
    there = (logs > -float("inf"))[:, None] & (v < VALUE)[None, :]
    mixed = tl.load(part, mask=there, other=0.0)
    result = tl.sum(weights[:, None] * mixed, 0)
    tl.store(out + at * VALUE + v, result.to(out.dtype.element_ty), mask=v < VALUE)


@triton.jit(do_not_specialize=["first_sequence", "splits"])  # one compilation for all
def prefill_kernel(
    query, out, parts, sums, qo_indptr, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, query_row,
    query_head, k_page, k_slot, k_head, v_page, v_slot, v_head, first_sequence, splits,
    sinks, SINKS: tl.constexpr, scale, window, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
    UPCAST: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr,
    VALUE: tl.constexpr, VALUE_2: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of a sequence's last tokens times query heads of one KV head, causal, over all keys
    that it sees or over one part of its sequence's."""
    # Tiles that read the same keys run at the same time.
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, split = first_sequence + tl.program_id(2) // splits, tl.program_id(2) % splits
    first_token = tl.load(qo_indptr + sequence)
    count = tl.load(qo_indptr + sequence + 1) - first_token
    r = tile * ROWS + tl.arange(0, ROWS)
    if tile * ROWS < count * GROUP:
        length = tl.load(kv_lens + sequence)
        token, head = r // GROUP, kv_head * GROUP + r % GROUP
        mine = token < count
        d, v = tl.arange(0, DIM_2), tl.arange(0, VALUE_2)
        row = first_token + token
        q_at = query + row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head
        q = tl.load(q_at + d[None, :], mask=mine[:, None] & (d < DIM)[None, :], other=0.0)
        cached = length - count
        high = tl.where(mine, cached + token, -1)
        low = tl.zeros((ROWS,), tl.int32)
        tile_low = cached + tile * ROWS // GROUP  # what the tile's first row sees
        stop = cached + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, count - 1) + 1
        first = 0
        if WINDOW:
            low = tl.maximum(high - window + 1, 0)
            # Parts are cut alike for all tiles.
            at = cached if SPLIT else tile_low
            first = tl.maximum(at - window + 1, 0) // BLOCK * BLOCK
        if SPLIT:
            size = tl.cdiv(tl.cdiv(length - first, splits), BLOCK) * BLOCK
            first += split * tl.maximum(size, MIN_SPLIT)
            stop = tl.minimum(stop, first + tl.maximum(size, MIN_SPLIT))
        free = tl.maximum(first, tl.minimum(stop, tile_low + 1) // BLOCK * BLOCK)
        best = tl.full((ROWS,), -float("inf"), tl.float32)
        total, mixed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VALUE_2), tl.float32)
        best, total, mixed = _attend(
            q, best, total, mixed, first, free, stop, low, high, k_pages + kv_head * k_head,
            v_pages + kv_head * v_head, kv_indices + tl.load(kv_indptr + sequence), k_page, k_slot,
            v_page, v_slot, scale, softcap, not WINDOW, SOFTCAP, PAGE, BLOCK, EXACT, UPCAST, ALIGN,
            DIM, DIM_2, VALUE, VALUE_2,
        )  # fmt: skip
        place = row.to(tl.int64) * tl.num_programs(1) * GROUP + head
        there = mine[:, None] & (v < VALUE)[None, :]
        if SPLIT:
            place = place * splits + split
            tl.store(sums + place, best + tl.log2(total), mask=mine)
            if first < stop:
                mixed /= tl.where(total > 0, total, 1.0)[:, None]
                tl.store(parts + place[:, None] * VALUE + v[None, :], mixed, mask=there)
        else:
            if SINKS:
                total += tl.exp2(tl.load(sinks + head, mask=mine, other=0.0) * LOG2_E - best)
            mixed /= tl.where(mine, total, 1.0)[:, None]
            result = mixed.to(out.dtype.element_ty)
            tl.store(out + place[:, None] * VALUE + v[None, :], result, mask=there)
