"""Packs quantized weights into panels: as they are stored, where blocks.h decodes their formats."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from radixcache.kernels.native.library import check, kernel
from radixcache.kernels.quantized import Quantized, Stored

_STORED = (  # in the order of blocks.h
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip


_ROWS = 1 << 14
"""Rows that are packed before their file's memory is given back; whole panels."""


class _Rows(ctypes.Structure):
    """`StoredRows` of blocks.h."""

    _fields_ = [("data", c_void_p), ("rows", c_int64), ("format", c_int64)]


def words_of(weight: Quantized) -> int:
    """32-bit words of a row in panels: numbers, scales and, if there are any, minimums."""
    _, depth = weight.shape
    return depth // weight.block * _head(weight) + depth * weight.bits // 32


def _head(weight: Quantized) -> int:
    return 1 if weight.levels else 2


def pack_quantized(weight: Quantized, panels: torch.Tensor) -> None:
    """Write a weight [out, in] to int32 panels, which are large enough."""
    (rows, depth), bits, block = weight.shape, weight.bits, weight.block
    if isinstance(weight, Stored) and len(weight.parts) == 1 and rows > _ROWS:
        ((layout, data),) = weight.parts
        for at in range(0, rows, _ROWS):
            part = Stored([(layout, data[at : at + _ROWS])])
            pack_quantized(part, panels[at * words_of(weight) :])
            weight.release()
        return
    of_rows = rows, depth, panels.data_ptr()
    if isinstance(weight, Stored) and all(layout.name in _STORED for layout, _ in weight.parts):
        parts = [(layout, data.contiguous()) for layout, data in weight.parts]
        for layout, data in parts:
            check(data, torch.uint8, (len(data), depth // layout.size * layout.stored))
        of = [_Rows(x.data_ptr(), len(x), _STORED.index(layout.name)) for layout, x in parts]
        array = (_Rows * len(of))(*of)
        kernel("pack_stored")(ctypes.addressof(array), bits, block, _head(weight), *of_rows)
        return
    numbers, *others = weight.tables()
    check(numbers, torch.uint8, (rows, depth))
    for table in others:
        check(table, torch.float32, (rows, depth // block))
    addresses = numbers.data_ptr(), *(table.data_ptr() for table in others), None
    kernel("pack_blocks")(*addresses[:3], bits, block, *of_rows)
