"""Reads tensors of a GGUF file into torch; quantized ones stay quantized, without loss.

Every block format is unpacked to integers, with a scale and a minimum for each 16 or 32 of them. A
scale is a float16 times a number of at most 7 bits, which float32 holds exactly.
"""

from __future__ import annotations

import logging

import torch

from radixcache.errors import ModelError
from radixcache.kernels.quantized import E2M1, Layout, Quantized, Stored, Tables
from radixcache.runtime.checkpoints.gguf_file import KINDS, GGUFTensor

_log = logging.getLogger("radixcache")

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Decoders unpack N stored blocks to numbers [N, ...], and scales and minimums [N, blocks].


def read_tensor(
    name: str, tensor: GGUFTensor, order: torch.Tensor | None = None
) -> torch.Tensor | Quantized:
    """Read a tensor without loss: as `Quantized`, bfloat16 or, for any other kind, float32.

    The file's float16 becomes float32. A dense tensor may be a view of the file's memory: do not
    write to it.

    Args:
        order: the file's row for each row; None keeps the file's order.

    Raises:
        ModelError: its kind needs the package `gguf`, which is not installed; or it is a vector in
            blocks, which no valid file has.
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
    if (layout := _LAYOUTS.get(kind.name)) is None or len(shape) != 2:
        return _by_gguf(name, tensor, rows)
    return Stored([(layout, rows)])


def _by_gguf(name: str, tensor: GGUFTensor, rows: torch.Tensor) -> torch.Tensor:
    try:
        from gguf import GGMLQuantizationType, quants

        dense = quants.dequantize(rows.numpy(), GGMLQuantizationType[tensor.kind.name])
    except ImportError:
        raise ModelError(
            f"the tensor {name} is of kind {tensor.kind.name}, which takes the package gguf: "
            "pip install '.[gguf]' in a checkout"
        ) from None
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"the tensor {name} is of kind {tensor.kind.name}, which is not read"
        ) from None
    _log.info("%s is of kind %s: it becomes float32", name, tensor.kind.name)
    return torch.from_numpy(dense).float().view(tensor.shape)


def _half(stored: torch.Tensor, at: int) -> torch.Tensor:
    """float32 [N, 1] of the float16 that begins at a byte of each block."""
    return stored[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(stored: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Unpack fields of `bits`: [N, bytes / group, 8 / bits, group], lowest bits first."""
    count, mask = 8 // bits, (1 << bits) - 1
    groups = stored.unflatten(1, (-1, group))
    found = stored.new_empty(len(stored), groups.shape[1], count, group)
    for field in range(count):
        out = found[:, :, field]
        if field < count - 1:
            torch.bitwise_and(groups >> (bits * field) if field else groups, mask, out=out)
        else:
            torch.bitwise_right_shift(groups, bits * field, out=out)
    return found


def _symmetric(numbers: torch.Tensor, scales: torch.Tensor, zero: int) -> Tables:
    """Tables of a format without minimums, in which the number `zero` stands for 0."""
    return numbers, scales, scales * -zero


def _q4_0(stored: torch.Tensor) -> Tables:
    return _symmetric(_fields(stored[:, 2:], 4, 16), _half(stored, 0), 8)


def _q4_1(stored: torch.Tensor) -> Tables:
    return _fields(stored[:, 4:], 4, 16), _half(stored, 0), _half(stored, 2)


def _five_bits(stored: torch.Tensor) -> torch.Tensor:
    """Unpack numbers of 5 bits; the file has all fifth bits before the others."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (stored[:, :4, None] >> places & 1) << 4
    return _fields(stored[:, 4:], 4, 16).flatten(1) | fifth.flatten(1)


def _q5_0(stored: torch.Tensor) -> Tables:
    return _symmetric(_five_bits(stored[:, 2:]), _half(stored, 0), 16)


def _q5_1(stored: torch.Tensor) -> Tables:
    return _five_bits(stored[:, 4:]), _half(stored, 0), _half(stored, 2)


def _q8_0(stored: torch.Tensor) -> Tables:
    return _symmetric(stored[:, 2:] ^ 0x80, _half(stored, 0), 128)


def _nonlinear(stored: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(_NONLINEAR).add(128).to(torch.uint8)
    return values[_fields(stored, 4, 16).int()]


def _iq4_nl(stored: torch.Tensor) -> Tables:
    return _symmetric(_nonlinear(stored[:, 2:]), _half(stored, 0), 128)


def _iq4_xs(stored: torch.Tensor) -> Tables:
    low = _fields(stored[:, 4:8], 4, 1).flatten(1)
    high = _fields(stored[:, 2:4], 2, 1).flatten(1)
    scales = _half(stored, 0) * ((low | high << 4).float() - 32)
    return _symmetric(_nonlinear(stored[:, 8:]), scales, 128)


def _q2_k(stored: torch.Tensor) -> Tables:
    pairs, numbers = stored[:, :16], _fields(stored[:, 16:80], 2, 32)
    return numbers, _half(stored, 80) * (pairs & 15), _half(stored, 82) * -(pairs >> 4).float()


def _q3_k(stored: torch.Tensor) -> Tables:
    third, low = _fields(stored[:, :32], 1, 32), _fields(stored[:, 32:96], 2, 32)
    numbers = low.flatten(1) | third.flatten(1) << 2
    halves, more = _fields(stored[:, 96:104], 4, 8), _fields(stored[:, 104:108], 2, 4)
    scales = (halves.flatten(1) | more.flatten(1) << 4).float() - 32
    return _symmetric(numbers, _half(stored, 108) * scales, 4)


def _scales_of_k(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of Q4_K and Q5_K, of 6 bits each in 12 bytes."""
    first, second, last = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1)
    minimums = torch.cat([second & 63, last >> 4 | second >> 6 << 4], 1)
    return _half(stored, 0) * scales, _half(stored, 2) * -minimums.float()


def _q4_k(stored: torch.Tensor) -> Tables:
    return _fields(stored[:, 16:], 4, 32), *_scales_of_k(stored)


def _q5_k(stored: torch.Tensor) -> Tables:
    fifth = _fields(stored[:, 16:48], 1, 32).flatten(1) << 4
    return _fields(stored[:, 48:], 4, 32).flatten(1) | fifth, *_scales_of_k(stored)


def _q6_k(stored: torch.Tensor) -> Tables:
    low, high = _fields(stored[:, :128], 4, 64), _fields(stored[:, 128:192], 2, 32)
    scales = _half(stored, 208) * stored[:, 192:208].contiguous().view(torch.int8)
    return _symmetric(low.flatten(1) | high.flatten(1) << 4, scales, 32)


def _mxfp4(stored: torch.Tensor) -> Tables:
    """Each scale is stored as an exponent of 8 bits."""
    exponents = stored[:, :1].int()
    scales = torch.where(exponents < 2, 1 << 21 << exponents, exponents - 1 << 23)
    return _symmetric(_fields(stored[:, 1:], 4, 16), scales.view(torch.float32), 12)


_LAYOUTS = {
    name: Layout(name, decode, bits, block, kind.block, kind.size, E2M1 * (name == "MXFP4"))
    for name, decode, bits, block in (
        *(("Q4_0", _q4_0, 4, 32), ("Q4_1", _q4_1, 4, 32), ("Q5_0", _q5_0, 8, 32)),
        *(("Q5_1", _q5_1, 8, 32), ("Q8_0", _q8_0, 8, 32), ("Q2_K", _q2_k, 8, 16)),
        *(("Q3_K", _q3_k, 8, 16), ("Q4_K", _q4_k, 4, 32), ("Q5_K", _q5_k, 8, 32)),
        *(("Q6_K", _q6_k, 8, 16), ("IQ4_NL", _iq4_nl, 8, 32), ("IQ4_XS", _iq4_xs, 8, 32)),
        ("MXFP4", _mxfp4, 4, 32),
    )
    for kind in KINDS.values()
    if kind.name == name
}
