"""The formats of quantised safetensors: which tensors make up a weight, and what they mean.

A format gives a weight [out, in] as `Quantized` where panels hold it to the bit, else as float32.
Sources: the packers of AutoAWQ, GPTQModel, compressed-tensors, bitsandbytes, MLX and NVIDIA's Model
Optimizer. Scales of activations are not read: rows are not rounded because a file says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any, NamedTuple

import torch

from radixcache.kernels.quantized import E4M3, INT4, INT8, Quantized, e2m1
from radixcache.runtime.model.checkpoint import FLOATS, Read, Shape


class Stem(NamedTuple):
    """The tensors of one weight by what follows its layer's name: their shapes, a way to read them
    as they are stored, and what the config says of them."""

    shapes: Mapping[str, Shape]
    read: Callable[[str], torch.Tensor]
    settings: Mapping[str, Any]


class Format(NamedTuple):
    """How a weight is stored.

    Attributes:
        methods: the values of `quant_method` that write it.
        parts: the dtypes of tensors as safetensors spells them; those with a "?" may be missing.
        shape, weight: of a stem; ValueError if its tensors do not fit each other.
    """

    name: str
    methods: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    shape: Callable[[Stem], Shape]
    weight: Callable[[Stem], Read]

    def fits(self, method: str, dtypes: Mapping[str, str]) -> bool:
        """Whether these are the tensors of such a weight."""
        known = {part.rstrip("?"): kinds for part, kinds in self.parts.items()}
        right = all(dtype in known.get(part, ()) for part, dtype in dtypes.items())
        complete = all(part in dtypes or part.endswith("?") for part in self.parts)
        return method in self.methods and right and complete


def _require(fits: bool, stem: Stem) -> None:
    if not fits:
        sizes = ", ".join(f"{part} {list(shape)}" for part, shape in sorted(stem.shapes.items()))
        raise ValueError(f"its tensors do not fit each other or its config: {sizes}")


def _numbers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] numbers that stand in words [..., m] of 32 bits, lowest bits first."""
    size = bits // gcd(bits, 8)  # bytes that hold whole numbers
    stored = words.contiguous().view(torch.uint8).unflatten(-1, (-1, size))
    if size > 1:
        places = torch.arange(0, 8 * size, 8, device=words.device)
        stored = (stored.long() << places).sum(-1, keepdim=True)
    shifts = torch.arange(0, 8 * size, bits, device=words.device).to(stored.dtype)
    return ((stored >> shifts) & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def _scaled(
    stem: Stem,
    numbers: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor | None = None,
) -> torch.Tensor | Quantized:
    """(number - zero) * scale with one rounding: of numbers [out, in], and scales and zeros of n
    groups of columns [out, n], which `groups` [in] names if they are not in order."""
    (out, depth), count, scales = numbers.shape, scales.shape[-1], scales.float()
    zeros = zeros.to(scales).expand(scales.shape)
    _require(scales.shape == (out, count) and count > 0, stem)
    of_column = torch.arange(depth, device=scales.device) * count // depth
    in_order = depth % count == 0 and (groups is None or torch.equal(groups.long(), of_column))
    _require(in_order or groups is not None, stem)
    half = 1 << bits - 1
    if in_order and depth % (32 * count) == 0 and bool((zeros == half).all()):  # signed numbers
        codes, levels = (numbers - half, INT8) if bits > 4 else (numbers - half & 15, INT4)
        scales = scales.repeat_interleave(depth // (32 * count), 1)
        return Quantized(codes, scales, None, 8 if bits > 4 else 4, levels)
    if in_order and (panels := _panels(numbers, scales, -zeros * scales)) is not None:
        return panels
    if groups is not None:
        of_column = groups.long()
        _require(groups.shape == (depth,) and int(of_column.min()) >= 0, stem)
        *sizes, last = torch.bincount(of_column, minlength=count).tolist()  # of the groups
        same = {*sizes} <= {max([last, *sizes])} and last > 0
        _require(same and len(sizes) == count - 1, stem)
    return (numbers - zeros[:, of_column]) * scales[:, of_column]


def _panels(
    numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> Quantized | None:
    """number * scale + minimum in blocks of 32; None where groups cut blocks, or where a product
    of a number and a scale needs more than 24 bits."""
    repeats, rest = divmod(numbers.shape[1], 32 * scales.shape[1])
    if rest or (scales.view(torch.int32) & 0xFF).any():
        return None
    scales, minimums = (x.repeat_interleave(repeats, 1) for x in (scales, minimums))
    return Quantized(numbers.contiguous(), scales, minimums, 4 if numbers.max() < 16 else 8)


def _fp8(stem: Stem) -> Read:
    """E4M3 times a scale of the whole, of a row, or of a block, of which the last may be cut."""
    names = [name for name in ("weight_scale", "weight_scale_inv") if name in stem.shapes]
    _require(len(names) == 1, stem)  # which mean the same
    weight, scales = stem.read("weight"), stem.read(names[0]).float()
    codes, (*outer, rows, columns) = weight.view(torch.uint8), weight.shape
    if bool((codes & 127 == 127).any()):
        raise ValueError("it has codes of no number")
    if scales.ndim == 4 and not outer:  # [out / 128, 1, in / 128, 1], as Model Optimizer has it
        scales = scales.flatten(2).flatten(0, 1)
    if scales.numel() == 1 and not outer:
        scales = scales.reshape(())
    if scales.shape in ((*outer,), (*outer, rows)):
        scales = scales.reshape(*scales.shape, *[1] * (weight.ndim - scales.ndim))
    said = stem.settings.get("weight_block_size"), *_of_groups(stem, "block_structure")
    high, wide, *more = [size for block in said for size in block or ()] or (128, 128)
    _require(more == [high, wide] * (len(more) // 2), stem)
    if scales.shape in ((*outer, rows, 1), (*outer, 1, 1)):
        high, wide = rows // scales.shape[-2], columns
    _require(scales.shape == (*outer, -(-rows // high), -(-columns // wide)), stem)
    scales = scales.repeat_interleave(min(high, rows), -2)[..., :rows, :]
    if columns % 32 or wide % 32:
        return weight.float() * scales.repeat_interleave(min(wide, columns), -1)[..., :columns]
    scales = scales[..., torch.arange(0, columns, 32, device=scales.device) // wide]
    if outer:
        each = zip(codes, scales, strict=True)
        return [Quantized(*tables, None, 8, E4M3) for tables in each]
    return Quantized(codes, scales, None, 8, E4M3)


def _of_groups(stem: Stem, key: str, bits: int | None = None) -> list[Any]:
    """What compressed-tensors says of weights, of so many bits, in each of its groups of layers."""
    groups = (stem.settings.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    return [says.get(key) for says in weights if bits in (None, says.get("num_bits", bits))]


def _check_groups(stem: Stem, bits: int) -> None:
    """Refuse a weight that lacks what compressed-tensors says that such weights have."""
    for key, values, part in (
        ("symmetric", [False], "weight_zero_point"), ("actorder", ["group", True], "weight_g_idx"),
    ):  # fmt: skip
        lacks = any(said in values for said in _of_groups(stem, key, bits))
        _require(part in stem.shapes or not lacks, stem)


def _int8(stem: Stem) -> torch.Tensor | Quantized:
    _check_groups(stem, 8)
    numbers, zeros = stem.read("weight").view(torch.uint8) ^ 128, torch.tensor(128)
    scales = stem.read("weight_scale")
    scales = scales.expand(len(numbers), 1) if scales.numel() == 1 else scales
    if "weight_zero_point" in stem.shapes:
        zeros = stem.read("weight_zero_point").int() + 128
    return _scaled(stem, numbers, 8, scales, zeros)


def _matrix(stem: Stem, sizes: list[int]) -> Shape:
    """The shape that a checkpoint tells."""
    _require(len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes), stem)
    return (*sizes,)


def _packed_shape(stem: Stem) -> Shape:
    return _matrix(stem, stem.read("weight_shape").tolist())


def _packed(stem: Stem) -> torch.Tensor | Quantized:
    """4 or 8 bits, signed numbers with half of their range added."""
    (out, depth), words = _packed_shape(stem), stem.shapes["weight_packed"]
    bits = next((n for n in (4, 8) if words == (out, -(-depth * n // 32))), 0)
    _require(bits > 0, stem)
    _check_groups(stem, bits)
    numbers = _numbers(stem.read("weight_packed"), bits)[:, :depth]
    zeros, groups = torch.tensor(1 << bits - 1), None
    if "weight_zero_point" in stem.shapes:
        found = stem.read("weight_zero_point")
        packed = found.dtype == torch.int32  # along the rows
        zeros = _numbers(found.T, bits).T[:out] if packed else found.int() + int(zeros)
    if "weight_g_idx" in stem.shapes and (found := stem.read("weight_g_idx")).max() >= 0:
        groups = found
    return _scaled(stem, numbers, bits, stem.read("weight_scale"), zeros, groups)


def _awq(stem: Stem) -> torch.Tensor | Quantized:
    def rows(words: torch.Tensor) -> torch.Tensor:
        words, order = words.T.contiguous(), [0, 4, 1, 5, 2, 6, 3, 7]  # places of 8 rows in a word
        parts = [(words >> 4 * at & 15).to(torch.uint8) for at in order]
        return torch.stack(parts, 1).flatten(0, 1)

    (_, words), (groups, out) = stem.shapes["qweight"], stem.shapes["scales"]
    _require(8 * words == out and stem.shapes["qzeros"] == (groups, words), stem)
    numbers, zeros = rows(stem.read("qweight")), rows(stem.read("qzeros"))
    return _scaled(stem, numbers, 4, stem.read("scales").T, zeros)


def _gptq_shape(stem: Stem) -> Shape:
    """The bits follow from the words of the zeros."""
    (words, out), (_, zeros) = stem.shapes["qweight"], stem.shapes["qzeros"]
    bits = 32 * zeros // max(out, 1)
    _require(bits in (2, 3, 4, 8) and 32 * zeros == bits * out and not 32 * words % bits, stem)
    return out, 32 * words // bits


def _gptq(stem: Stem) -> torch.Tensor | Quantized:
    """2, 3, 4 or 8 bits; version 1 keeps zeros less 1. Of symmetric ones, packers have mixed up the
    versions, but the zero is known."""
    bits, says = 32 * stem.shapes["qweight"][0] // _gptq_shape(stem)[1], stem.settings.get
    _require("g_idx" in stem.shapes or not says("desc_act"), stem)
    zeros = _numbers(stem.read("qzeros"), bits).T.int()
    half = 1 << bits - 1
    if says("sym"):
        _require(zeros.unique().tolist() in ([half - 1], [half]), stem)
        zeros.fill_(half)
    elif (says("checkpoint_format") or says("format")) != "gptq_v2":
        zeros += 1
    _require(zeros.shape == stem.shapes["scales"][::-1], stem)
    groups = stem.read("g_idx") if "g_idx" in stem.shapes else None
    numbers = _numbers(stem.read("qweight").T, bits)
    return _scaled(stem, numbers, bits, stem.read("scales").T, zeros, groups)


def _nvfp4_shape(stem: Stem) -> Shape:
    (rows, columns), ours = stem.shapes.get("weight") or stem.shapes["weight_packed"], stem.shapes
    whole = "weight_scale_2" if "weight" in ours else "weight_global_scale"
    known = {"weight", "weight_packed", "weight_scale_2", "weight_global_scale"} & ours.keys()
    _require(len(known) == 2 and ours.get(whole) in ((), (1,)), stem)
    _require(ours["weight_scale"] == (rows, columns / 8), stem)
    return rows, 2 * columns


def _nvfp4(stem: Stem) -> Quantized:
    """E2M1 in blocks of 16 with scales in E4M3, and one for the whole: Model Optimizer's is a
    factor, compressed-tensors' a divisor."""
    codes = stem.read("weight" if "weight" in stem.shapes else "weight_packed")
    scales = stem.read("weight_scale").float()
    if "weight" in stem.shapes:
        scales *= stem.read("weight_scale_2")
    else:
        scales /= stem.read("weight_global_scale")
    return e2m1(torch.stack([codes & 15, codes >> 4], -1).flatten(1), scales)


def _mxfp4_shape(stem: Stem) -> Shape:
    *outer, count, size = stem.shapes["blocks"]
    _require(len(outer) == 2 and size == 16 and stem.shapes["scales"] == (*outer, count), stem)
    return *outer, 32 * count


def _mxfp4(stem: Stem) -> list[Quantized]:
    """E2M1 in blocks of 32, each with an exponent of 2, of all experts."""
    blocks, scales = stem.read("blocks"), (stem.read("scales").float() - 127).exp2()
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2)
    return [e2m1(*each) for each in zip(codes, scales, strict=True)]


_STATE = "weight.quant_state.bitsandbytes__nf4"


def _nf4_state(stem: Stem) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(stem.read(_STATE).tolist()))
    return found


def _nf4_shape(stem: Stem) -> Shape:
    return _matrix(stem, _nf4_state(stem)["shape"])


def _nf4(stem: Stem) -> torch.Tensor | Quantized:
    """Levels of a map, the first of two in the high bits, times the largest of a block, which may
    be codes of another map in blocks of their own, plus an offset."""
    state, levels = _nf4_state(stem), stem.read("weight.quant_map").float()
    codes, most = stem.read("weight").contiguous().view(torch.uint8), stem.read("weight.absmax")
    codes = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).flatten()
    if most.dtype == torch.uint8:
        inner, size = stem.read("weight.nested_absmax"), state["nested_blocksize"]
        _require(inner.shape == (-(-len(most) // size),), stem)
        steps = stem.read("weight.nested_quant_map").float()[most.int()]
        inner = inner.repeat_interleave(min(size, len(most)))[: len(most)]
        most = steps * inner + state["nested_offset"]
    rows, columns = _nf4_shape(stem)
    size, count = state["blocksize"], rows * columns  # half a byte may be left
    _require(len(codes) - count in (0, 1) and most.shape == (-(-count // size),), stem)
    _require(levels.shape == (16,) and bool(levels.isfinite().all()), stem)
    if size % 32 or columns % size:
        factors = most.repeat_interleave(min(size, count))[:count]
        return (levels[codes[:count].int()] * factors).view(rows, columns)
    scales = most.view(rows, -1).repeat_interleave(size // 32, 1)
    return Quantized(codes.view(rows, columns), scales, None, 4, (*levels.tolist(),))


def _mlx_shape(stem: Stem) -> Shape:
    bits, (*outer, words) = stem.settings["bits"], stem.shapes["weight"]
    groups = *outer, 32 * words // bits // stem.settings["group_size"]
    _require(bits in (2, 4, 8) and stem.shapes["scales"] == stem.shapes["biases"] == groups, stem)
    return *outer, 32 * words // bits


def _mlx(stem: Stem) -> Read:
    """number * scale + bias in groups; a tensor may hold all experts."""
    numbers = _numbers(stem.read("weight"), stem.settings["bits"])
    scales, biases = stem.read("scales").float(), stem.read("biases").float()
    tables = [x.reshape(-1, *x.shape[-2:]) for x in (numbers, scales, biases)]
    found = [x for each in zip(*tables, strict=True) if (x := _panels(*each)) is not None]
    if len(found) == len(tables[0]):
        return found if numbers.ndim == 3 else found[0]
    each = numbers.shape[-1] // scales.shape[-1]
    return numbers * scales.repeat_interleave(each, -1) + biases.repeat_interleave(each, -1)


_CT, _INTS, _ANY = "compressed-tensors", ("I32", "I64"), (*FLOATS, "I8", "I32")
_TABLES = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS}
INPUTS = {"input_scale?": _ANY, "activation_scale?": _ANY, "input_global_scale?": _ANY}
"""Scales of activations."""

FORMATS = (
    Format("FP8", ("fp8", "modelopt", _CT), {"weight": ("F8_E4M3",), "weight_scale?": FLOATS,
           "weight_scale_inv?": (*FLOATS, "F8_E8M0"), **INPUTS},
           lambda s: s.shapes["weight"], _fp8),
    Format("INT8", (_CT,), {"weight": ("I8",), "weight_scale": FLOATS,
           "weight_zero_point?": ("I8",), **INPUTS}, lambda s: s.shapes["weight"], _int8),
    Format("packed integers", (_CT,), {"weight_packed": ("I32",), "weight_scale": FLOATS,
           "weight_shape": _INTS, "weight_zero_point?": ("I8", "I32"), "weight_g_idx?": _INTS,
           **INPUTS}, _packed_shape, _packed),
    Format("NVFP4", ("modelopt", _CT), {"weight?": ("U8",), "weight_packed?": ("U8",),
           "weight_scale": ("F8_E4M3",), "weight_scale_2?": ("F32",),
           "weight_global_scale?": ("F32",), **INPUTS}, _nvfp4_shape, _nvfp4),
    Format("MXFP4", ("mxfp4",), {"blocks": ("U8",), "scales": ("U8",)}, _mxfp4_shape, _mxfp4),
    Format("AWQ", ("awq",), _TABLES,
           lambda s: (s.shapes["scales"][1], s.shapes["qweight"][0]), _awq),
    Format("GPTQ", ("gptq",), {**_TABLES, "g_idx?": _INTS}, _gptq_shape, _gptq),
    Format("NF4", ("bitsandbytes",), {"weight": ("U8", *FLOATS), "weight.absmax": ("F32", "U8"),
           "weight.quant_map": ("F32",), _STATE: ("U8",), "weight.nested_absmax?": ("F32",),
           "weight.nested_quant_map?": ("F32",)}, _nf4_shape, _nf4),
    Format("MLX", ("mlx",), {"weight": ("U32",), "scales": FLOATS, "biases": FLOATS},
           _mlx_shape, _mlx),
)  # fmt: skip
