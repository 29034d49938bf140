"""Products of rows with the weights of their experts, by Triton.

Decodes give an expert one row or a few, so their time is that of reading the weights of the chosen
experts. A program takes one expert's rows, at most a tile of them, and some of its columns. The
grid depends only on the number of rows, so that CUDA graphs can capture it; programs without rows
end at once (as in the fused MoE kernels of vLLM and SGLang).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixcache.kernels.triton.prefill import AMD, INTERPRETED

COLUMNS = 64


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    order: torch.Tensor,
    active: int = 0,
) -> torch.Tensor:
    """Multiplies rows with their experts' `weight` [count, out, in], and adds `bias` [count, out].
    Row `order[i] // active` of x [T, in] gives row i of the result [N, out]; if `active` is 0, row
    i of x [N, in] gives row `order[i]`.

    Args:
        ends: [count] int32, where the rows of each expert end; they are sorted by expert.
        order: [N] int64.
    """
    count, columns, depth = weight.shape
    rows = 16
    while rows < 64 and rows * count < len(order):
        rows *= 2
    out = x.new_empty(len(order), columns)
    tiles = min(count, len(order)) + len(order) // rows
    exact = x.dtype == torch.float32
    block = 64 if exact or AMD else 128
    grouped_kernel[triton.cdiv(columns, COLUMNS), tiles](
        x, weight, weight if bias is None else bias, out, ends, order, active, columns, depth,
        x.stride(0), *weight.stride()[:2], COUNT=count, COUNT_2=triton.next_power_of_2(count),
        BIAS=bias is not None, GATHER=active > 0, EVEN=depth % block == 0, ROWS=rows,
        COLUMNS=COLUMNS, BLOCK=block, EXACT=exact, UPCAST=INTERPRETED, num_stages=2 if AMD else 4,
    )  # fmt: skip
    return out


@triton.jit
def grouped_kernel(
    x, weight, bias, out, ends, order, active, columns, depth, x_row, weight_expert, weight_row,
    COUNT: tl.constexpr, COUNT_2: tl.constexpr, BIAS: tl.constexpr, GATHER: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    e, tile = tl.arange(0, COUNT_2), tl.program_id(1)
    end = tl.load(ends + e, mask=e < COUNT, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < COUNT), other=0)
    tiles = tl.where(e < COUNT, tl.cdiv(end - start, ROWS), 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum(((upto <= tile) & (e < COUNT)).to(tl.int32), 0)
    if expert < COUNT:
        mine = e == expert
        first = tl.sum(tl.where(mine, start - (upto - tiles) * ROWS, 0), 0) + tile * ROWS
        stop = tl.sum(tl.where(mine, end, 0), 0)
        r = first + tl.arange(0, ROWS)
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, BLOCK)
        there, inside = r < stop, n < columns
        place = tl.load(order + r, mask=there, other=0)
        source, target = r.to(tl.int64), place
        if GATHER:
            source, target = place // active, r.to(tl.int64)
        x_at = x + source[:, None] * x_row + k[None, :]
        w_at = weight + expert.to(tl.int64) * weight_expert
        w_at += n[:, None].to(tl.int64) * weight_row + k[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, depth, BLOCK):
            x_mask, w_mask = there[:, None], inside[:, None]
            if not EVEN:
                left = (begin + k < depth)[None, :]
                x_mask, w_mask = x_mask & left, w_mask & left
            a = tl.load(x_at + begin, mask=x_mask, other=0.0)
            b = tl.load(w_at + begin, mask=w_mask, other=0.0)
            if UPCAST:  # the interpreter multiplies the bits of bfloat16 as integers
                a, b = a.to(tl.float32), b.to(tl.float32)
            if EXACT:  # not TF32
                total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
            else:
                total = tl.dot(a, tl.trans(b), total)
        if BIAS:
            more = tl.load(bias + expert * columns + n, mask=inside, other=0.0)
            total += more.to(tl.float32)[None, :]
        to = out + target[:, None] * columns + n[None, :]
        mask = there[:, None] & inside[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)
