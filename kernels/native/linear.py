"""Linear layers whose weights are packed at load, in the order in which the kernels read them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int8, c_int32, c_uint8, c_void_p
from functools import cache

import torch

from radixcache.kernels.native.blocks import pack_quantized, words_of
from radixcache.kernels.native.library import check, kernel, library
from radixcache.kernels.quantized import E4M3, INT4, INT8, Quantized

_FORMATS = [
    *((32, 1, "numbers"), (16, 2, "numbers"), (8, 32, "numbers")),
    *((4, 32, "numbers"), (4, 16, "numbers"), (8, 32, "ints"), (8, 16, "ints"), (4, 32, "ints")),
    *((4, 32, "levels"), (4, 16, "levels"), (4, 32, "floats"), (8, 32, "e4m3")),
]
"""Formats by their bits, block, and what codes stand for, in the order of panels.h."""

_CODES = {(4, INT4): "ints", (8, INT8): "ints", (8, E4M3): "e4m3"}
_CODES |= dict.fromkeys([(bits, ()) for bits in (4, 8)], "numbers")


class Levels(ctypes.Structure):
    """`Levels` of panels.h."""

    _fields_ = [
        *(("floats", c_float * 16), ("bytes", c_int8 * 16), ("moved", c_uint8 * 16)),
        ("narrow", c_int32),
    ]

    def __init__(self, weight: Quantized) -> None:
        super().__init__(weight.levels)
        if weight.whole:
            levels = tuple(map(int, weight.levels))
            self.narrow = all(-16 <= level < 16 for level in levels)
            by = 16 if self.narrow else 128
            self.bytes, self.moved = levels, tuple(level + by for level in levels)


class Weight(ctypes.Structure):
    """`Weight` of linear.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("panels", "bias")),
        *((name, c_int32) for name in ("depth", "padded", "columns", "format")),
        *((name, c_void_p) for name in ("rounds", "levels")),
    ]


class PackedLinear:
    """x [rows, in] to x @ weight.T + bias [rows, out], in float32 or bfloat16.

    A row's result has the same bits beside any other rows. A weight in fewer bits gives the bits of
    the float32 weight that it stands for; bfloat16 times bfloat16 gives those of the processor's
    instruction, where it has one.

    A row that is rounded to 8 bits has the same bits on every processor. No row is rounded for a
    weight whose levels are not whole.

    Args:
        weight: [out, in] float32, bfloat16 or quantized; it is copied.
        bias: [out].
        rounds: while it is not 0, rows are rounded to 8 bits before they meet a quantized weight.

    Attributes:
        struct: what the kernels take; it points to memory of this object.
    """

    def __init__(
        self,
        weight: torch.Tensor | Quantized,
        bias: torch.Tensor | None = None,
        rounds: c_int32 | None = None,
    ) -> None:
        self.out_features, self.in_features = rows, depth = weight.shape
        panel = c_int32.in_dll(library(), "radixcache_panel").value
        panels, padded = -(-rows // panel), depth
        if isinstance(weight, Quantized) and not _fits(weight):
            weight = weight.dense()
        if isinstance(weight, Quantized):
            bits, block, levels = weight.format
            codes = _CODES.get((bits, levels), "levels" if weight.whole else "floats")
            if (bits, block, codes) not in _FORMATS or depth % block:
                raise ValueError(f"no panels of {bits} bits in blocks of {block} for {depth}")
            words = words_of(weight)
        else:
            check(weight, weight.dtype, (rows, depth), apart=True)
            if weight.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"no panels of {weight.dtype}")
            bits, block, codes = weight.itemsize * 8, 4 // weight.itemsize, "numbers"
            padded = -(-depth // block) * block
            words = padded // block
        self._panels = torch.empty(panels * words * panel, dtype=torch.int32)
        if isinstance(weight, Quantized):
            pack_quantized(weight, self._panels)
        else:
            stride = weight.stride(0) * weight.itemsize
            kernel("pack")(
                *(weight.data_ptr(), stride, weight.itemsize, rows, depth),
                self._panels.data_ptr(),
            )
        self._bias: torch.Tensor | None = None
        if bias is not None:
            check(bias, bias.dtype, (rows,))
            self._bias = torch.zeros(panels * panel)
            self._bias[:rows] = bias
        self._levels: Levels | None = None
        if isinstance(weight, Quantized):
            self._levels = Levels(weight) if codes in ("levels", "floats") else None
            rounds = rounds if weight.whole else None
        self._rounds = rounds
        self.struct = Weight(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            *(depth, padded, rows, _FORMATS.index((bits, block, codes))),
            None if rounds is None else ctypes.addressof(rounds),
            None if self._levels is None else ctypes.addressof(self._levels),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        check(x, x.dtype, (rows, self.in_features), apart=True)
        out = x.new_empty(rows, self.out_features)
        kernel("linear", x.dtype)(
            *(x.data_ptr(), x.stride(0), ctypes.addressof(self.struct), out.data_ptr(), rows)
        )
        return out

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [T] int64 of the weight, as [T, in]."""
        check(ids, torch.int64, (len(ids),))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"rows of {self.out_features}")
        out = torch.empty(len(ids), self.in_features, dtype=dtype)
        kernel("rows", dtype)(
            *(ctypes.addressof(self.struct), ids.data_ptr(), len(ids), out.data_ptr())
        )
        return out

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] float32, made anew."""
        return self.rows(torch.arange(self.out_features), torch.float32)

    @property
    def block(self) -> tuple[int, int]:
        """Address and bytes of the panels."""
        return self._panels.data_ptr(), self._panels.nbytes


def _fits(weight: Quantized) -> bool:
    """Whether panels hold its values. Panels of FP8 have no NaN, and multiply numbers that are far
    smaller by scales that are far larger; a process may have asked for zeros in their place."""
    if weight.levels != E4M3:
        return True
    numbers, scales = weight.tables()
    has_tiny = torch.tensor(2.0**-129).mul(2.0**127).mul(4) == 1
    return bool(has_tiny & (scales < 256).all() & ((numbers & 127) < 127).all())


@cache
def rounding_problem() -> str | None:
    """What is wrong with the kernels of rows in 8 bits on this machine; None if products have the
    bits of the rule."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(9, 96, generator=random)
    tables = {(16, "levels"): (*range(-16, 16, 2),), (32, "levels"): (*range(-128, 128, 17),)}
    for bits, block, codes in _FORMATS[2:-2]:
        numbers = torch.randint(1 << bits, (37, 96), generator=random, dtype=torch.uint8)
        scales, minimums = torch.rand(2, 37, 96 // block, generator=random)
        levels = tables.get((block, codes), ())
        if codes == "ints":
            levels = INT8 if bits == 8 else INT4
        weight = Quantized(numbers, scales, None if levels else -minimums, bits, levels)
        product, expected = PackedLinear(weight, None, c_int32(1)), weight.times_rounded(x)
        if not all(torch.equal(product(x[:n]), expected[:n]) for n in (1, 4, 9)):
            return "the kernels give wrong products of 8-bit rows"
    return None


def rounding_is_fast() -> bool:
    """Whether this processor multiplies whole numbers of 8 bits faster than floats."""
    return bool(c_int32.in_dll(library(), "radixcache_rounds_fast").value)
