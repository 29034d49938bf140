"""Reads tensors of a GGUF file into torch; quantized ones stay quantized, without loss.

Every block format is unpacked to integers, with a scale and a minimum for each 16 or 32 of them, or
to codes of levels, with a scale. A scale is a float16 times a number of at most 7 bits, which
float32 holds exactly.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from radixcache.errors import ModelError
from radixcache.kernels.quantized import E2M1, INT4, INT8, Layout, Quantized, Stored, Tables
from radixcache.runtime.checkpoints.gguf_file import KINDS, GGUFTensor
from radixcache.runtime.model.gguf import grids
from radixcache.runtime.model.gguf.fields import fields, half, in_turn

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TERNARY = (-1, 0, 1, 2)

# Decoders unpack N stored blocks to numbers [N, ...], scales and, if any, minimums [N, blocks].


def read_tensor(
    name: str, tensor: GGUFTensor, order: torch.Tensor | slice | None = None
) -> torch.Tensor | Quantized:
    """Read a tensor without loss: as `Quantized`, bfloat16 or, for any other kind, float32.

    The file's float16 becomes float32. A dense tensor may be a view of the file's memory: do not
    write to it.

    Args:
        order: the file's row for each row; None keeps the file's order.

    Raises:
        ModelError: its kind is not read, or needs the package `gguf`, which is not installed; or it
            is a vector in blocks, which no valid file has.
    """
    kind, shape = tensor.kind, tensor.shape or (1,)
    if len(shape) == 1 and kind.block > 1:
        raise ModelError(f"the tensor {name} is a vector of kind {kind.name}, which is not read")
    stored = torch.frombuffer(tensor.data, dtype=torch.uint8)
    rows = stored.view(*shape[: max(len(shape) - 1, 1)], -1)  # a vector's elements are its rows
    if order is not None:
        rows = rows[order]
    if kind.name in _DENSE:
        dense = rows.clone() if rows.data_ptr() % 8 else rows
        dense = dense.view(_DENSE[kind.name]).view(len(dense), *shape[1:])
        return dense if kind.name == "BF16" else dense.float()
    if (layout := _LAYOUTS.get(kind.name)) is None:
        raise ModelError(f"the tensor {name} is of kind {kind.name}, which is not read")
    if kind.name in _OF_GRIDS and find_spec("gguf") is None:
        raise ModelError(
            f"the tensor {name} is of kind {kind.name}, which takes the package gguf: "
            "pip install '.[gguf]' in a checkout"
        )
    matrix = Stored([(layout, rows.flatten(0, -2))])
    return matrix if len(shape) == 2 else matrix.dense().view(-1, *shape[1:])


def _q4_0(stored: torch.Tensor) -> Tables:
    return fields(stored[:, 2:], 4, 16) ^ 8, half(stored, 0)


def _q4_1(stored: torch.Tensor) -> Tables:
    return fields(stored[:, 4:], 4, 16), half(stored, 0), half(stored, 2)


def _five_bits(stored: torch.Tensor) -> torch.Tensor:
    """Unpack numbers of 5 bits; the file has all fifth bits before the others."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (stored[:, :4, None] >> places & 1) << 4
    return fields(stored[:, 4:], 4, 16).flatten(1) | fifth.flatten(1)


def _q5_0(stored: torch.Tensor) -> Tables:
    return _five_bits(stored[:, 2:]) - 16, half(stored, 0)


def _q5_1(stored: torch.Tensor) -> Tables:
    return _five_bits(stored[:, 4:]), half(stored, 0), half(stored, 2)


def _q8_0(stored: torch.Tensor) -> Tables:
    return stored[:, 2:], half(stored, 0)


def _iq4_nl(stored: torch.Tensor) -> Tables:
    return fields(stored[:, 2:], 4, 16), half(stored, 0)


def _iq4_xs(stored: torch.Tensor) -> Tables:
    low = in_turn(stored[:, 4:8], 4)
    high = in_turn(stored[:, 2:4], 2)
    scales = half(stored, 0) * ((low | high << 4).float() - 32)
    return fields(stored[:, 8:], 4, 16), scales


def _q2_k(stored: torch.Tensor) -> Tables:
    pairs, numbers = stored[:, :16], fields(stored[:, 16:80], 2, 32)
    return numbers, half(stored, 80) * (pairs & 15), half(stored, 82) * -(pairs >> 4).float()


def _q3_k(stored: torch.Tensor) -> Tables:
    third, low = fields(stored[:, :32], 1, 32), fields(stored[:, 32:96], 2, 32)
    numbers = low.flatten(1) | third.flatten(1) << 2
    halves, more = fields(stored[:, 96:104], 4, 8), fields(stored[:, 104:108], 2, 4)
    scales = (halves.flatten(1) | more.flatten(1) << 4).float() - 32
    return numbers, half(stored, 108) * scales


def _tq1_0(stored: torch.Tensor) -> Tables:
    """A byte times 3^k has its ternary digit k above its 8 bits, once more times 3."""
    powers, digits = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8), []
    for begin, end, group, count in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        part = stored[:, begin:end].view(-1, 1, group) * powers[:count, None]
        digits.append((part.int() * 3 >> 8).flatten(1))
    return torch.cat(digits, 1), half(stored, 52)


def _tq2_0(stored: torch.Tensor) -> Tables:
    return fields(stored[:, :64], 2, 32), half(stored, 64)


def _scales_of_k(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of Q4_K and Q5_K, of 6 bits each in 12 bytes."""
    first, second, last = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1)
    minimums = torch.cat([second & 63, last >> 4 | second >> 6 << 4], 1)
    return half(stored, 0) * scales, half(stored, 2) * -minimums.float()


def _q4_k(stored: torch.Tensor) -> Tables:
    return fields(stored[:, 16:], 4, 32), *_scales_of_k(stored)


def _q5_k(stored: torch.Tensor) -> Tables:
    fifth = fields(stored[:, 16:48], 1, 32).flatten(1) << 4
    return fields(stored[:, 48:], 4, 32).flatten(1) | fifth, *_scales_of_k(stored)


def _q6_k(stored: torch.Tensor) -> Tables:
    low, high = fields(stored[:, :128], 4, 64), fields(stored[:, 128:192], 2, 32)
    scales = half(stored, 208) * stored[:, 192:208].contiguous().view(torch.int8)
    return (low.flatten(1) | high.flatten(1) << 4) - 32, scales


def _mxfp4(stored: torch.Tensor) -> Tables:
    """Each scale is stored as an exponent of 8 bits."""
    exponents = stored[:, :1].int()
    scales = torch.where(exponents < 2, 1 << 21 << exponents, exponents - 1 << 23)
    return fields(stored[:, 1:], 4, 16), scales.view(torch.float32)


def _nvfp4(stored: torch.Tensor) -> Tables:
    """Each scale is stored as a float of 8 bits; its sign does not count, and 127 stands for 0."""
    codes = stored[:, :4].int()
    scales = ((codes & 127) << 20).view(torch.float32) * 2.0**119  # half of it
    return fields(stored[:, 4:], 4, 8), scales.masked_fill_(codes == 127, 0)


_OF_GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
_LAYOUTS = {
    name: Layout(name, decode, bits, block, kind.block, kind.size, levels)
    for name, decode, bits, block, levels in (
        *(("Q4_0", _q4_0, 4, 32, INT4), ("Q4_1", _q4_1, 4, 32, ()), ("Q5_0", _q5_0, 8, 32, INT8)),
        *(("Q5_1", _q5_1, 8, 32, ()), ("Q8_0", _q8_0, 8, 32, INT8), ("Q2_K", _q2_k, 4, 16, ())),
        *(("Q3_K", _q3_k, 4, 16, (*range(-4, 4),)), ("Q4_K", _q4_k, 4, 32, ())),
        *(("Q5_K", _q5_k, 8, 32, ()), ("Q6_K", _q6_k, 8, 16, INT8)),
        *(("IQ4_NL", _iq4_nl, 4, 32, _NONLINEAR), ("IQ4_XS", _iq4_xs, 4, 32, _NONLINEAR)),
        *(("MXFP4", _mxfp4, 4, 32, E2M1), ("NVFP4", _nvfp4, 4, 16, E2M1)),
        *(("TQ1_0", _tq1_0, 4, 32, _TERNARY), ("TQ2_0", _tq2_0, 4, 32, _TERNARY)),
        ("IQ1_S", grids.iq1_s, 4, 32, grids.OF_IQ1),
        ("IQ1_M", grids.iq1_m, 4, 16, grids.OF_IQ1),
        ("IQ2_XXS", grids.iq2_xxs, 4, 32, grids.OF_IQ2),
        ("IQ2_XS", grids.iq2_xs, 4, 16, grids.OF_IQ2),
        ("IQ2_S", grids.iq2_s, 4, 16, grids.OF_IQ2),
        ("IQ3_XXS", grids.iq3_xxs, 4, 32, grids.OF_IQ3_XXS),
        ("IQ3_S", grids.iq3_s, 4, 32, grids.OF_IQ3_S),
    )
    for kind in KINDS.values()
    if kind.name == name
}
