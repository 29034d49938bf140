"""Products of rows with quantized weights, by Triton: W4A16, and 8 bits of integers or FP8.

Weights stay in their bits in the GPU's memory; a program unpacks tiles of them into the dtype of
the rows, with the values of the dense weight. It multiplies them from the left, so that rows are
the short side of an instruction, as in Marlin and Machete: any number of rows takes the same
instructions in the same order along the depth, and a row's result does not depend on its company.

It has run in Triton's interpreter and was compiled ahead (`make test-gpu`), never on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from radixcache.kernels.quantized import E2M1, E4M3, INT4, INT8, Quantized
from radixcache.kernels.triton.prefill import AMD, INTERPRETED

COLUMNS = 64
WORDS = 64
"""Bytes of a tile's row. Of 4 bits, the low halves hold a tile's first 64 codes."""

GROUP = 128
"""The most numbers that share a stored scale."""

CODES = {(): "numbers", INT4: "ints", INT8: "ints", E2M1: "e2m1", E4M3: "e4m3"}
"""What codes stand for, by `Quantized.levels`; any other levels of 4 bits are a table."""


class QuantizedLinear:
    """x [T, in] to x @ weight.T + bias [T, out], with sums in float32.

    torch's `_weight_int4pack_mm` and `_scaled_mm` are no such: they round scales, or rows.

    Args:
        weight: [out, in], on the device; it is packed anew.
        bias: [out] in the dtype of the rows, or None.
    """

    def __init__(self, weight: Quantized, bias: torch.Tensor | None) -> None:
        numbers, *tables = weight.tables()
        self._columns, self._depth = weight.shape
        codes = F.pad(numbers, (0, -self._depth % (WORDS * 8 // weight.bits)))
        if weight.bits == 4:
            low, high = codes.unflatten(1, (-1, 2, WORDS)).unbind(2)
            codes = (low | high << 4).flatten(1)
        group = weight.block
        while group < GROUP and all(_in_pairs(table) for table in tables):
            tables, group = [table[:, ::2] for table in tables], 2 * group
        kind = CODES.get(weight.levels, "table")
        levels = codes if kind != "table" else torch.tensor(weight.levels).to(codes.device)
        self._codes, (self._scales, *minimums) = codes.contiguous(), map(_narrowed, tables)
        least = minimums[0] if minimums else self._scales  # which the kernel does not read
        self._others = least, levels, self._codes if bias is None else bias
        self._options = {
            "BITS": weight.bits, "CODES": kind, "GROUP": group, "GROUPS": max(1, WORDS // group),
            "MINIMUM": bool(minimums), "BIAS": bias is not None,
            "EVEN": self._depth % (WORDS * 8 // weight.bits) == 0, "COLUMNS": COLUMNS,
            "WORDS": WORDS, "UPCAST": INTERPRETED, "num_stages": 2 if AMD else 4,
        }  # fmt: skip

    @staticmethod
    def takes(weight: Quantized) -> bool:
        """Whether the kernel knows its values: of 8 bits only some, and no NaN."""
        if weight.levels == E4M3:
            return not bool((weight.tables()[0] & 127 == 127).any())
        return weight.bits == 4 or weight.levels in CODES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(len(x), self._columns)
        rows = 16 if len(x) <= 16 else 64
        linear_kernel[triton.cdiv(self._columns, COLUMNS), triton.cdiv(len(x), rows)](
            x, self._codes, self._scales, *self._others, out, len(x), self._columns, self._depth,
            x.stride(0), self._codes.shape[1], self._scales.shape[1], ROWS=rows,
            EXACT=x.dtype == torch.float32, **self._options,
        )  # fmt: skip
        return out


@torch.inference_mode()
def probe(device: torch.device, dtype: torch.dtype) -> None:
    """Compare products with dense ones, and a row alone with the same among others.

    Raises:
        RuntimeError: the kernel gives wrong results.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 160, generator=random).to(dtype).to(device)
    for bits, levels in ((4, ()), (4, INT4), (8, E4M3)):
        numbers = torch.randint(15, (70, 160), generator=random, dtype=torch.uint8).to(device)
        scales = torch.rand(70, 5, generator=random).to(device)
        weight = Quantized(numbers, scales, None if levels else -7 * scales, bits, levels)
        product, dense = QuantizedLinear(weight, None), weight.dense().to(dtype)
        found, wanted = product(x), x.double() @ dense.double().T
        if (found - wanted).abs().max() > 2e-2 * wanted.abs().max():
            raise RuntimeError("its kernel gives wrong results")
        if not torch.equal(product(x[20:21]), found[20:21]):
            raise RuntimeError("a row's result depends on its company")


def _in_pairs(table: torch.Tensor) -> bool:
    return table.shape[1] % 2 == 0 and torch.equal(table[:, ::2], table[:, 1::2])


def _narrowed(table: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits, if these hold them."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal((narrow := table.to(dtype)).float(), table):
            return narrow.contiguous()
    return table.contiguous()


@triton.jit
def linear_kernel(
    x, codes, scales, minimums, levels, bias, out, rows, columns, depth, x_row, words, groups,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    MINIMUM: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr, EXACT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of the result: COLUMNS rows of the weight times ROWS rows of x."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k, g = tl.arange(0, WORDS), tl.arange(0, GROUPS)
    inside, there = (n < columns)[:, None], r < rows
    code_at = codes + n[:, None].to(tl.int64) * words + k[None, :]
    group_at = n[:, None].to(tl.int64) * groups + g[None, :]
    x_at = x + r[None, :].to(tl.int64) * x_row + k[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for begin in range(0, words, WORDS):
        word = tl.load(code_at + begin, mask=inside, other=0)
        for part in tl.static_range(8 // BITS):
            at = begin * (8 // BITS) + part * WORDS
            code = word if BITS == 8 else word >> 4 * part & 15
            value = _values(code, levels, BITS, CODES)
            group = at // GROUP
            known = inside & (group + g < groups)[None, :]
            value = tl.reshape(value, (COLUMNS, GROUPS, WORDS // GROUPS))
            scale = tl.load(scales + group_at + group, mask=known, other=0.0)
            value *= scale.to(tl.float32)[:, :, None]
            if MINIMUM:
                minimum = tl.load(minimums + group_at + group, mask=known, other=0.0)
                value += minimum.to(tl.float32)[:, :, None]
            weight = tl.reshape(value, (COLUMNS, WORDS)).to(x.dtype.element_ty)
            x_mask = there[None, :]
            if not EVEN:
                x_mask = x_mask & (at + k < depth)[:, None]
            row = tl.load(x_at + at, mask=x_mask, other=0.0)
            if UPCAST:  # the interpreter, whose sums in float32 depend on shapes
                more = tl.dot(weight.to(tl.float64), row.to(tl.float64), out_dtype=tl.float64)
                total += more.to(tl.float32)
            elif EXACT:  # not TF32
                total = tl.dot(weight, row, total, input_precision="ieee")
            else:
                total = tl.dot(weight, row, total)
    if BIAS:
        more = tl.load(bias + n, mask=n < columns, other=0.0)
        total += more.to(tl.float32)[:, None]
    to = out + r[:, None].to(tl.int64) * columns + n[None, :]
    mask = there[:, None] & (n < columns)[None, :]
    tl.store(to, tl.trans(total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _values(code, levels, BITS: tl.constexpr, CODES: tl.constexpr):
    """float32 of codes; small floats are float16 with another bias, denormals, too."""
    if CODES == "table":
        value = tl.load(levels + code)
    elif CODES == "ints":
        half: tl.constexpr = 1 << BITS - 1
        value = ((code ^ half).to(tl.int32) - half).to(tl.float32)
    elif CODES == "e4m3":
        wide = code.to(tl.uint16)
        value = (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.float16, bitcast=True)
        value = value.to(tl.float32) * 256.0
    elif CODES == "e2m1":
        wide = code.to(tl.uint16)
        value = (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True)
        value = value.to(tl.float32) * 32768.0
    else:
        value = code.to(tl.float32)
    return value
