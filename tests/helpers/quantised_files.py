"""Quantised checkpoints, written by the public definitions of their formats, and what they mean.

Numbers are packed bit by bit, and a weight's meaning is computed apart from any packing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
Made = tuple[Parts, torch.Tensor]
"""The parts by what follows a layer's name, and the float32 weight [out, in] that they mean."""

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.linspace(-1, 1, 16) ** 3 + 0.01
"""A map of its own, whose place of each level is told apart."""


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., m] with the bits of numbers [..., n] one after the other, lowest first."""
    flat = (numbers.long().numpy()[..., None] >> np.arange(bits)) & 1
    flat = flat.reshape(*numbers.shape[:-1], -1).astype(np.uint8)
    flat = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    return torch.from_numpy(np.packbits(flat, -1, bitorder="little").view(np.int32))


def spread(groups: torch.Tensor, columns: int) -> torch.Tensor:
    return groups.float().repeat_interleave(columns // groups.shape[1], 1)


def whole_numbers(
    w: torch.Tensor, bits: int, group: int, dtype: torch.dtype, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [out, in], scales and zeros [out, in / group]."""
    blocks, most = w.unflatten(1, (-1, group)), (1 << bits) - 1
    high, low = blocks.amax(2), blocks.amin(2)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).to(dtype)
    zeros = (-low / scales.float()).round().clamp(1, most)
    zeros = torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros
    numbers = (blocks / scales.float()[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, most).flatten(1), scales, zeros


def fp8(shape: tuple[int, int] | str, end: str = "weight_scale", fours: bool = False) -> Any:
    def write(w: torch.Tensor) -> Made:
        out, columns = w.shape
        high, wide = {"tensor": (out, columns), "row": (1, columns)}.get(shape, shape)  # type: ignore
        at = torch.arange(out) // high, torch.arange(columns) // wide
        scales = torch.rand(int(at[0][-1]) + 1, int(at[1][-1]) + 1) + 0.5
        scales = scales.bfloat16() if shape == "row" else scales
        codes = w.to(torch.float8_e4m3fn)
        meaning = codes.float() * scales.float()[at[0]][:, at[1]]
        scales = scales.reshape(()) if shape == "tensor" else scales
        scales = scales[:, None, :, None] if fours else scales
        return {"weight": codes, end: scales, "input_scale": torch.tensor(0.1)}, meaning

    return write


def int8(w: torch.Tensor, shift: bool = False) -> Made:
    scales = (w.abs().amax(1, keepdim=True) / 100).bfloat16()
    numbers = (w / scales.float()).round()
    zeros = torch.arange(len(w))[:, None] % 21 - 10 if shift else torch.zeros(())
    more = {"weight_zero_point": zeros.to(torch.int8)} if shift else {}
    parts = {"weight": numbers.to(torch.int8), "weight_scale": scales, **more}
    return parts, (numbers - zeros) * scales.float()


def packed(
    bits: int,
    group: int,
    symmetric: bool = True,
    order: bool = False,
    bare: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """`bare`: zeros are not packed, but signed."""

    def write(w: torch.Tensor) -> Made:
        columns = w.shape[1]
        size = group or columns
        at = torch.randperm(columns) // size if order else torch.arange(columns) // size
        by_group = torch.argsort(at, stable=True)
        numbers, scales, zeros = whole_numbers(w[:, by_group], bits, size, dtype, symmetric)
        numbers = numbers[:, torch.argsort(by_group)]
        parts = {"weight_packed": words(numbers, bits), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(w.shape)
        if not symmetric:
            signed = (zeros - (1 << bits - 1)).to(torch.int8)
            parts["weight_zero_point"] = signed if bare else words(zeros.T, bits).T
        if order:
            parts["weight_g_idx"] = at.int()
        return parts, (numbers - zeros[:, at]) * scales.float()[:, at]

    return write


def awq(w: torch.Tensor) -> Made:
    numbers, scales, zeros = whole_numbers(w, 4, 64, torch.float16)

    def columns(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    meaning = (numbers - spread(zeros, w.shape[1])) * spread(scales, w.shape[1])
    parts = {"qweight": columns(numbers), "qzeros": columns(zeros), "scales": scales.T}
    return parts, meaning


def gptq(
    bits: int, group: int = 64, version: int = 1, order: bool = False, symmetric: bool = False
) -> Any:
    def write(w: torch.Tensor) -> Made:
        numbers, scales, zeros = whole_numbers(w, bits, group, torch.float16, symmetric)
        at = torch.arange(w.shape[1]) // group
        at = at[torch.randperm(len(at))] if order else at
        parts = {
            "qweight": words(numbers, bits).T,
            "qzeros": words(zeros.T - (2 - version), bits),
            "scales": scales.T,
            "g_idx": at.int(),
        }
        parts |= {"bias": torch.zeros(len(w))} if bits == 8 else {}  # as packers once did
        return parts, (numbers - zeros[:, at]) * scales.float()[:, at]

    return write


def nvfp4(divides: bool) -> Any:
    def write(w: torch.Tensor) -> Made:
        whole = torch.tensor(3.7) if divides else torch.tensor(0.21)
        scales = (w.unflatten(1, (-1, 16)).abs().amax(2) * 2).to(torch.float8_e4m3fn)
        codes = torch.randint(0, 16, w.shape)
        steps = scales.float() / whole if divides else scales.float() * whole
        packed = words(codes, 4).view(torch.uint8)
        if divides:
            parts = {"weight_packed": packed, "weight_global_scale": whole.view(1)}
        else:
            parts = {"weight": packed, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}
        return {**parts, "weight_scale": scales}, E2M1[codes] * spread(steps, w.shape[1])

    return write


def nf4(nested: bool) -> Any:
    def write(w: torch.Tensor) -> Made:
        codes = torch.randint(0, 16, (w.numel(),))
        most, state = torch.rand(w.numel() // 64) * 0.1, {"blocksize": 64, "shape": [*w.shape]}
        parts = {"weight.absmax": most}
        if nested:
            table, inner = torch.rand(256), torch.rand(-(-len(most) // 256)) * 0.2
            small = torch.randint(0, 256, most.shape)
            most = table[small] * inner[torch.arange(len(most)) // 256] + 0.03
            parts = {"weight.absmax": small.to(torch.uint8), "weight.nested_absmax": inner}
            parts["weight.nested_quant_map"] = table
            state |= {"nested_blocksize": 256, "nested_offset": 0.03}
        raw = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        parts |= {"weight.quant_state.bitsandbytes__nf4": raw, "weight.quant_map": NF4}
        parts["weight"] = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
        return parts, NF4[codes].view(w.shape) * most.repeat_interleave(64).view(w.shape)

    return write


def mlx(bits: int, group: int) -> Any:
    def write(w: torch.Tensor) -> Made:
        numbers, scales, zeros = whole_numbers(w, bits, group, torch.float16)
        biases = (-zeros * scales.float() + 0.001).half()
        parts = {"weight": words(numbers, bits).view(torch.uint32), "scales": scales}
        meaning = numbers * spread(scales, w.shape[1]) + spread(biases, w.shape[1])
        return {**parts, "biases": biases}, meaning

    return write


class Kind(NamedTuple):
    """How a format is written, its config, and the columns that a group takes."""

    write: Callable[[torch.Tensor], Made]
    config: dict[str, Any] | None
    columns: int = 64


def _ct(kind: str, **says: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **says}}}
    groups["group_1"] = {"targets": ["re:.*x"], "weights": {"num_bits": 2, "symmetric": False}}
    method = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"]}
    return {**method, "config_groups": groups}


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_NVIDIA = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
KINDS: dict[str, Kind] = {
    "fp8 blocks": Kind(fp8((128, 128), "weight_scale_inv"), _BLOCKS),
    "fp8 blocks of 96": Kind(fp8((96, 80), "weight_scale_inv"),
                             {**_BLOCKS, "weight_block_size": [96, 80]}),
    "fp8 tensor": Kind(fp8("tensor", "weight_scale_inv"), {"quant_method": "fp8"}),
    "modelopt fp8": Kind(fp8("tensor"), None),  # only in hf_quant_config.json
    "modelopt fp8 blocks": Kind(fp8((128, 128), fours=True), _NVIDIA),
    "ct fp8": Kind(fp8("row"), _ct("float-quantized")),
    "ct fp8 blocks": Kind(fp8((64, 32), "weight_scale"),
                          _ct("float-quantized", block_structure=[64, 32])),
    "ct int8": Kind(int8, _ct("int-quantized")),
    "ct int8 zeros": Kind(lambda w: int8(w, True), _ct("int-quantized", symmetric=False)),
    "ct int4 32": Kind(packed(4, 32), _ct("pack-quantized"), 32),
    "ct int4 128": Kind(packed(4, 128), _ct("pack-quantized"), 128),
    "ct int4 zeros": Kind(packed(4, 64, False), _ct("pack-quantized", symmetric=False)),
    "ct int4 order": Kind(packed(4, 64, False, True),
                          _ct("pack-quantized", symmetric=False, actorder="group")),
    "ct int4 16": Kind(packed(4, 16), _ct("pack-quantized"), 16),
    "ct int4 float32": Kind(packed(4, 64, False, dtype=torch.float32),
                            _ct("pack-quantized", symmetric=False)),
    "ct int4 bare": Kind(packed(4, 64, False, bare=True), _ct("pack-quantized", symmetric=False)),
    "ct int8 channel": Kind(packed(8, 0), _ct("pack-quantized")),
    "awq": Kind(awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": Kind(gptq(4), _GPTQ),
    "gptq 128": Kind(gptq(4, 128), _GPTQ, 128),
    "gptq v2": Kind(gptq(4, version=2), {**_GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq sym": Kind(gptq(4, version=2, symmetric=True), {**_GPTQ, "sym": True}),  # says version 1
    "gptq 2 sym": Kind(gptq(2, symmetric=True),
                       {**_GPTQ, "bits": 2, "sym": True, "checkpoint_format": "gptq_v2"}),
    "gptq 2": Kind(gptq(2), _GPTQ),
    "gptq 3": Kind(gptq(3), _GPTQ),
    "gptq 8": Kind(gptq(8), _GPTQ),
    "gptq order": Kind(gptq(4, order=True), {**_GPTQ, "desc_act": True}),
    "nf4": Kind(nf4(False), _BNB),
    "nf4 twice": Kind(nf4(True), _BNB),
    "modelopt nvfp4": Kind(nvfp4(False), _NVIDIA),
    "ct nvfp4": Kind(nvfp4(True), _ct("nvfp4-pack-quantized")),
    "mlx 4": Kind(mlx(4, 64), {"group_size": 64, "bits": 4}),
    "mlx 8": Kind(mlx(8, 32), {"group_size": 32, "bits": 8}, 32),
}  # fmt: skip


def fuse_experts(tensors: Parts) -> Parts:
    """Put experts that are stored one by one into one tensor each, as newer checkpoints have."""
    found = dict(tensors)
    for name in [name for name in tensors if ".experts.0.gate_proj." in name]:
        above, per = name.partition(".experts.")[0], dict[str, torch.Tensor]()
        for part in ("gate", "up", "down"):
            names = [f"{above}.experts.{n}.{part}_proj.weight" for n in range(99)]
            per[part] = torch.stack([found.pop(name) for name in names if name in found])
        found[f"{above}.experts.gate_up_proj"] = torch.cat([per["gate"], per["up"]], 1)
        found[f"{above}.experts.down_proj"] = per["down"]
    return found


def quantise(plain: Path, kind: str, coded: Path, dense: Path, fused: bool = False) -> None:
    """Copy a plain checkpoint twice: quantised, and with float32 weights that mean the same.

    `fused`: all experts are in one tensor, as far as the format has that.
    """
    torch.manual_seed(7)
    write, config, columns = KINDS[kind]
    is_mlx, found, meanings = kind.startswith("mlx"), Parts(), Parts()
    for folder in (coded, dense):
        copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    for name, weight in (fuse_experts(tensors) if fused else tensors).items():
        linear = "_proj" in name or (is_mlx and weight.ndim == 2 and "gate" not in name)
        linear &= weight.ndim > 1
        if not linear or weight.shape[-1] % columns or (weight.shape[-2] % 32 and not is_mlx):
            found[name] = meanings[name] = weight
            continue
        stem = name.removesuffix(".weight")
        if weight.ndim == 2:
            parts, meanings[name] = write(weight)
            found |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
            continue
        in_one = "weight_scale_inv" in write(weight[0])[0]
        above, _, last = stem.rpartition(".experts.")
        names = [last] if in_one or last == "down_proj" else ["gate_proj", "up_proj"]
        meant = []
        for part, each in zip(names, weight.chunk(len(names), 1), strict=True):
            made, meaning = zip(*map(write, each), strict=True)
            meant.append(torch.stack(meaning))
            for end in made[0]:
                every = [parts[end] for parts in made]
                if in_one and end != "input_scale":
                    found[stem + end.removeprefix("weight")] = torch.stack(every)
                elif is_mlx:
                    found[f"{above}.switch_mlp.{part}.{end}"] = torch.stack(every)
                elif not in_one:
                    for n, tensor in enumerate(every):
                        found[f"{above}.experts.{n}.{part}.{end}"] = tensor
        meanings[name] = torch.cat(meant, 1)
    save(found, coded)
    save(meanings, dense)
    if config is None:
        says = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
        (coded / "hf_quant_config.json").write_text(json.dumps(says))
    else:
        settings = json.loads((coded / "config.json").read_text())
        name = "quantization" if is_mlx else "quantization_config"
        (coded / "config.json").write_text(json.dumps({**settings, name: config}))


def save(tensors: Parts, folder: Path) -> None:
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
