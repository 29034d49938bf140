"""Quantised safetensors are read to the bit; spoiled ones are a sentence, or right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixcache import InvalidRequest, ModelError
from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.quantized import Quantized, dense
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.compatibility import quantization_of
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.weights.quantized_checkpoint import QuantizedCheckpoint
from radixcache.runtime.model.weights.quantized_formats import FORMATS, Stem
from radixcache.states.recurrent import SequenceStates
from tests.helpers.models import tiny_model
from tests.helpers.native import needs_kernels
from tests.helpers.quantised_files import KINDS, Parts, quantise, save
from tests.helpers.simulated_cuda import CUDA, simulated_cuda

SIZES: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 64,
    "num_key_value_heads": 3,  # 192 rows: a block and a half
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DELTA = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3_moe": EXPERTS, "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "phi3": {}, "glm4": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Any:
    made: dict[str, Path] = {}

    def plain(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = tiny_model(family, folder, 3, **SIZES, **FAMILIES[family])
        return made[family]

    return plain


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, Path]:
    """A small model of each kind, and beside it what it means."""
    top = tmp_path_factory.mktemp("small")
    plain = tiny_model("llama", top / "plain", 3, **SMALL)
    for kind in KINDS:
        quantise(plain, kind, top / kind, top / f"{kind} means")
    return {kind: top / kind for kind in KINDS}


def logits(folder: Path, **options: Any) -> torch.Tensor:
    options = {"device": "cpu", "dtype": "float32", "quantized_activations": "off", **options}
    model = load_model(folder, **options)
    assert model.layers_by.startswith("radixcache")
    batch, tokens = PagedBatch.of([np.zeros(1, np.int32)], [20], [20], 20), np.arange(20) * 13
    pool = model.allocate(1, 20, 1)
    states = [SequenceStates(-1, 0)] if model.state_shapes else []
    return model.forward(tokens, batch, np.arange(20), pool, states)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", pytest.param("qwen3_5_moe_text", marks=needs_kernels)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_has_the_bits_of_what_it_means(plain, tmp_path, family, kind):
    quantise(plain(family), kind, tmp_path / "coded", tmp_path / "dense", "qwen3_5" in family)
    assert torch.equal(logits(tmp_path / "coded"), logits(tmp_path / "dense"))


@pytest.mark.parametrize("family", ["phi3", "glm4"])
@pytest.mark.parametrize("kind", ["fp8 blocks", "awq", "ct int8", "gptq order", "mlx 4"])
def test_rows_of_a_quantised_weight_are_cut_and_put_in_order(plain, tmp_path, family, kind):
    """Of joined products, whose last block may lie on a border, and of RoPE's pairs."""
    quantise(plain(family), kind, tmp_path / "coded", tmp_path / "dense")
    assert torch.equal(logits(tmp_path / "coded"), logits(tmp_path / "dense"))


DENSE = {"fp8 blocks of 96", "ct int4 order", "ct int4 16", "ct int4 float32", "gptq order"}
"""Blocks and groups that cut those of panels, or have no order, or scales of too many bits."""


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_weights_are_quantised_or_dense_in_the_dtype_of_the_steps(small, kind):
    means, config = load_file(f"{small[kind]} means/model.safetensors"), small[kind] / "config.json"
    said = quantization_of(small[kind], json.loads(config.read_text()))
    with simulated_cuda(), open_checkpoint(small[kind], CUDA, torch.bfloat16) as stored:
        checkpoint = QuantizedCheckpoint(stored, small[kind], said)
        found: dict[str, Any] = {name: checkpoint.tensor(name) for name in means}
        for name, weight in found.items():
            values = dense(weight)
            assert values.device == CUDA
            assert torch.equal(values.bfloat16().cpu(), means[name].bfloat16())
    assert any(isinstance(weight, Quantized) for weight in found.values()) == (kind not in DENSE)
    assert ("becomes bfloat16" in checkpoint.kept) == (kind in DENSE)
    assert checkpoint.shapes.keys() == means.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_weights_stay_in_their_bits_where_a_panel_fits(small, kind):
    model = load_model(small[kind], device="cpu", dtype="float32")
    assert ("becomes float32" in model.kept) == (kind in DENSE)


@needs_kernels
@pytest.mark.parametrize(("kind", "line"), [
    ("awq", "llama of AWQ in 4.3 bits a weight (down_proj, embed_tokens, lm_head not quantised) i"),
    ("ct fp8", "llama of FP8 in 8.1 bits a weight (down_proj, embed_tokens, lm_head not quantised"),
    ("gptq order", "llama of GPTQ in 4.6 bits a weight (GPTQ becomes float32; down_proj, embed_"),
    ("mlx 8", "llama of MLX in 9.0 bits a weight in float32 on cpu"),
])  # fmt: skip
def test_the_start_tells_the_format_and_what_is_dense(small, kind, line):
    model = load_model(small[kind], device="cpu", dtype="float32", exact=True)
    assert model.placement.startswith(line)
    assert ("its rounding of activations is left out)" in model.placement) == (kind == "ct fp8")


@needs_kernels
@pytest.mark.parametrize("kind", ["ct fp8", "nf4"])
def test_what_never_rounds_is_named_where_rounding_is_asked_for(small, kind):
    with pytest.raises(InvalidRequest, match="weights in our own loop, not FP8 or NF4: say off"):
        load_model(small[kind], device="cpu", dtype="float32", quantized_activations="on")


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    """Of layers that are quantised in different ways."""
    return {"config_groups": {str(n): {"weights": each} for n, each in enumerate(weights)}}


def test_the_start_tells_what_is_dense_in_some_layers(plain, tmp_path):
    coded = tmp_path / "coded"
    quantise(plain("llama"), "awq", coded, tmp_path / "dense")
    meant, tensors = load_file(tmp_path / "dense/model.safetensors"), Parts()
    for name, tensor in load_file(coded / "model.safetensors").items():
        stem = f"{name.rpartition('.')[0]}.weight"
        if "layers.0.self_attn.q_proj" in name:
            tensors[stem] = meant[stem]
        else:
            tensors[name] = tensor
    save(tensors, coded)
    kept = load_model(coded, device="cpu").kept
    assert kept.endswith("bits a weight (embed_tokens, lm_head, some of q_proj not quantised)")
    assert torch.equal(logits(coded), logits(tmp_path / "dense"))


UNFIT = "its tensors do not fit each other or its config"


@pytest.mark.parametrize(("kind", "change", "reason"), [
    ("awq", {"version": "gemv"}, "by awq whose version is gemv$"),
    ("gptq", {"checkpoint_format": "marlin"}, "whose checkpoint_format is marlin$"),
    ("mlx 4", {"mode": "mxfp4"}, "by MLX whose mode is mxfp4$"),
    ("mlx 4", {"bits": 8}, UNFIT),
    ("fp8 blocks", {"fmt": "e5m2"}, "whose fmt is e5m2$"),
    ("ct int8", {"transform_config": {"a": 1}}, "whose transform_config is {'a': 1}$"),
    ("gptq order", "lacks g_idx", UNFIT),
    ("ct int4 order", "lacks weight_g_idx", UNFIT),
    ("ct int4 zeros", "lacks weight_zero_point", UNFIT),
    ("ct int8 zeros", "lacks weight_zero_point", UNFIT),
    ("ct nvfp4", "lacks weight_global_scale", UNFIT),
    ("ct nvfp4", "has weight_scale_2", UNFIT),
    ("modelopt nvfp4", "has weight_global_scale", UNFIT),
    ("nf4", "lacks weight.absmax", r"by bitsandbytes \(model.layers.0.self_attn.k_proj has wei"),
    ("ct fp8", "spoils weight", "k_proj.weight: it has codes of no number"),
    ("ct int8", groups({"symmetric": True}, {"num_bits": 8, "symmetric": False}), UNFIT),
    ("ct int4 32", groups({"actorder": None}, {"actorder": "group"}), UNFIT),
    ("ct fp8 blocks", groups({"block_structure": [64, 32]}, {"block_structure": [9, 9]}), UNFIT),
    ("ct fp8 blocks", {"weight_block_size": [128, 128]}, UNFIT),
    ("gptq sym", "spoils qzeros", UNFIT),
    ("gptq order", "clears g_idx", UNFIT),
    ("awq", "has pre_quant_scale", "k_proj has pre_quant_scale in F32, qweight in I32, .*in F16"),
    ("mlx 4", "has conv1d.weight", "with convolutions in its own order .*k_proj.conv1d.weight"),
])  # fmt: skip
def test_what_changes_the_meaning_of_numbers_is_refused(small, tmp_path, kind, change, reason):
    """Settings of the config, or tensors that a layer lacks or has as well."""
    folder = copytree(small[kind], tmp_path / "model")
    tensors, file = load_file(folder / "model.safetensors"), folder / "config.json"
    if isinstance(change, str):
        does, part = change.split()
        name = f"model.layers.0.self_attn.k_proj.{part}"
        if does == "lacks":
            del tensors[name]
        elif does == "spoils":
            tensors[name].view(torch.uint8)[1, 2] = 255
        elif does == "clears":
            tensors[name].zero_()
        else:
            tensors[name] = torch.ones(()) if "scale" in part else torch.ones(8, 4, 1)
        save(tensors, folder)
    else:
        config = json.loads(file.read_text())
        config["quantization" if "mlx" in kind else "quantization_config"] |= change
        file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(("key", "value"), [
    ("shape", ["a", "b"]), ("shape", [128.0, 128]), ("shape", [1 << 40, 1 << 40]), ("shape", [128]),
    ("blocksize", 1 << 50), ("blocksize", 32),
])  # fmt: skip
def test_a_spoiled_state_of_nf4_is_a_sentence(small, tmp_path, key, value):
    folder = copytree(small["nf4"], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    tensors[name] = torch.tensor([*json.dumps({**state, key: value}).encode()], dtype=torch.uint8)
    save(tensors, folder)
    with pytest.raises(ModelError, match=f"k_proj.weight: {UNFIT}|says .64, 128.$"):
        load_model(folder, device="cpu")


HUGE = 1 << 50
_BYTES, _STATE = (
    torch.full((32, 1), 0x77, dtype=torch.uint8),
    "weight.quant_state.bitsandbytes__nf4",
)
_NF4 = {"weight": _BYTES, "weight.quant_map": torch.ones(16), "weight.absmax": torch.ones(1)}
_TWICE = {"weight.nested_absmax": torch.ones(1), "weight.nested_quant_map": torch.ones(256)}


@pytest.mark.parametrize(("name", "parts", "says"), [
    ("FP8", {"weight": torch.ones(64, 256), "weight_scale": torch.ones(1, 2)}, [HUGE, 128]),
    ("FP8", {"weight": torch.ones(256, 48), "weight_scale": torch.ones(2, 1)}, [128, HUGE]),
    ("NF4", _NF4, {"blocksize": HUGE}),
    ("NF4", {**_NF4, **_TWICE, "weight.absmax": torch.zeros(1, dtype=torch.uint8)},
     {"blocksize": 64, "nested_blocksize": HUGE, "nested_offset": 0}),
])  # fmt: skip
def test_a_block_that_is_far_larger_than_its_weight_takes_no_memory(name, parts, says):
    form, parts = next(form for form in FORMATS if form.name == name), {**parts}
    if name == "FP8":
        parts["weight"] = parts["weight"].to(torch.float8_e4m3fn)
    else:
        raw = json.dumps({**says, "shape": [2, 32]}).encode()
        parts[_STATE] = torch.tensor([*raw], dtype=torch.uint8)
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
    found = form.weight(Stem(shapes, parts.__getitem__, {"weight_block_size": says}))
    assert not isinstance(found, list)
    assert dense(found).eq(1).all()


def test_experts_in_fp8_that_lack_their_scales_are_refused(plain, tmp_path):
    coded = tmp_path / "coded"
    quantise(plain("qwen3_5_moe_text"), "fp8 blocks", coded, tmp_path / "dense", fused=True)
    tensors = load_file(coded / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.gate_up_proj_scale_inv"]
    save(tensors, coded)
    with pytest.raises(ModelError, match=r"by fp8 .*mlp.experts has gate_up_proj in F8_E4M3"):
        load_model(coded, device="cpu")


ENDS = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales", "bias",
    "weight_zero_point", "g_idx", "input_scale", "qweight", "pre_quant_scale",
)  # fmt: skip


def spoil(tensors: Parts, stem: str, other: Parts, rng: random.Random) -> str:
    """Change the tensors of a quantised weight, and say how."""
    parts = [name for name in tensors if name.startswith(f"{stem}.")]
    name, change = rng.choice(parts), rng.randrange(9)
    tensor = tensors.pop(name)
    if change == 1:
        tensors[name + rng.choice(("_2", "x"))] = tensor
    elif change == 2:
        tensors[name] = tensor[tensor.ndim * (slice(0),) or None][:0]
    elif change == 3:
        tensors[name] = tensor[:-1] if tensor.ndim else tensor.repeat(2)
    elif change == 4:
        turns = tensor.ndim == 2 and len(tensor) != len(tensor[0])  # else nobody can tell
        tensors[name] = tensor.T if turns else torch.stack([tensor, tensor])
    elif change == 5:
        tensors[name] = tensor.to(torch.int16)
    elif change:
        tensors[name] = tensor
    if change == 6:
        tensors.setdefault(f"{stem}.{rng.choice(ENDS)}", torch.ones(1))
    if change == 7:
        scales = [each for each in parts if "scale" in each or "absmax" in each]
        name = rng.choice(scales)
        bad = tensors[name].float()
        bad.view(-1)[0] = torch.nan
        if tensors[name].is_floating_point():
            tensors[name] = bad.to(tensors[name].dtype)
    if change == 8:
        for each in parts:
            del tensors[each]
        tensors.update({each: other[each] for each in other if each.startswith(f"{stem}.")})
    return f"{change} {name}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_checkpoint_is_a_sentence_or_right(small, tmp_path, kind):
    """Eight each: part of them change what no weight needs, or mix formats of one method."""
    method, stem = (KINDS[kind].config or {}).get("quant_method"), "model.layers.0.self_attn.k_proj"
    weights, sentences = load_file(small[kind] / "model.safetensors"), 0
    means = {each: load_file(f"{small[each]} means/model.safetensors") for each in KINDS}
    others = [k for k in KINDS if (KINDS[k].config or {}).get("quant_method") != method]
    for seed in range(8):
        rng, tensors = random.Random(f"{kind} {seed}"), dict(weights)
        spoiled, right = (tmp_path / f"{name}{seed}" for name in ("spoiled", "right"))
        copytree(small[kind], spoiled)
        copytree(f"{small[kind]} means", right)
        other = rng.choice(others)
        if seed == 7:  # the tensors stay, and the config is another's
            config = json.loads((small[other] / "config.json").read_text())
            (spoiled / "config.json").write_text(json.dumps(config))
            what = f"config of {other}"
        else:
            what = spoil(tensors, stem, load_file(small[other] / "model.safetensors"), rng)
            save(tensors, spoiled)
        if what[0] == "8":
            save({**means[kind], f"{stem}.weight": means[other][f"{stem}.weight"]}, right)
        found, error = outcome(spoiled)
        sentences += error is not None
        assert "\n" not in str(error)
        assert found is None or torch.equal(found, logits(right)), what
    assert sentences > 1


def outcome(folder: Path) -> tuple[torch.Tensor | None, ModelError | None]:
    """A model's logits, or the sentence that refuses it."""
    try:
        return logits(folder), None
    except ModelError as error:
        return None, error
