"""Each row of the table of families against transformers' own model, as it is saved and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from radixcache.errors import ModelError
from radixcache.kernels.quantized import Quantized
from radixcache.kernels.spec import (
    MLP,
    Experts,
    Unknown,
)
from radixcache.kernels.torch.experts import choose
from radixcache.runtime.model import reference
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.compatibility import quantization_of
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families import describe as module
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.families.table import FAMILIES, WRAPPERS
from radixcache.runtime.model.kv_pool import LayerShape, bytes_per_token
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.weights.quantized_checkpoint import QuantizedCheckpoint
from radixcache.runtime.model.weights.sources import SafetensorsSource
from tests.helpers.decoders import DECODERS
from tests.helpers.models import MULTIMODAL, auto_class, tiny_model
from tests.runtime.model.families.faults import faults
from tests.runtime.model.steps import TOKENS, logits_by_reference, read, settings_of

TOLERANCE = 2e-5  # of the range of the logits; delta nets and Mamba 2 come to 6e-6


def changed(folder: Path, new: Mapping[str, torch.Tensor], *without: str) -> Path:
    """The folder with these tensors, and without those whose names begin so."""
    found = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in found.items() if not name.startswith(without)}
    save_file({**kept, **new}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refused(folder: Path, reason: str, kind: type[Exception] = Unknown) -> None:
    with pytest.raises(kind, match=reason), read(folder):
        pass


@torch.inference_mode()
def logits_by_transformers(folder: Path) -> torch.Tensor:
    kind = auto_class(settings_of(folder)["model_type"])
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: torch.Tensor = model(TOKENS[None], use_cache=False).logits[0]
    return found


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / (expected.max() - expected.min()))


def test_the_rows_are_those_of_the_table() -> None:
    of_images = {kind for kind, _ in MULTIMODAL.values()}
    assert {*DECODERS, *of_images} == {*FAMILIES}
    assert WRAPPERS - MULTIMODAL.keys() == {"gemma4", "qwen3_5", "qwen3_5_moe"}


@pytest.mark.parametrize("family", DECODERS)
def test_the_reference_computes_what_transformers_does(family, tmp_path) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False, **DECODERS[family])
    right, expected = describe(settings_of(folder)), logits_by_transformers(folder)
    got = logits_by_reference(folder)
    print(f"{family}: {error(got, expected):.1e}")
    assert error(got, expected) < TOLERANCE
    with pytest.raises(Unknown, match="its config has attention_magic"):
        describe({**settings_of(folder), "attention_magic": 2.0})
    for name, described, fault in faults(right):
        wrong = error(logits_by_reference(folder, described, fault), expected)
        print(f"{family}, wrong {name}: {wrong:.1e}")
        assert wrong > 20 * TOLERANCE, name
    if right.ropes:
        with pytest.raises(Unknown):
            describe({**settings_of(folder), "rope_scaling": {"rope_type": "ntk", "factor": 2.0}})


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_text_of_a_model_that_takes_images(family, tmp_path) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False)
    assert error(logits_by_reference(folder), logits_by_transformers(folder)) < TOLERANCE
    settings = settings_of(folder)
    assert describe({**settings, "magic": 2.0})  # of images, and not of the text
    with pytest.raises(Unknown, match="its config has magic"):
        describe({**settings, "text_config": {**settings["text_config"], "magic": 2.0}})
    with pytest.raises(Unknown, match="its config has rope_scaling"):  # whose is it?
        describe({**settings, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})


def test_decays_of_ling_without_a_bound_are_those_of_kimi_linear(tmp_path) -> None:
    folder = tiny_model("bailing_hybrid", tmp_path, tokenizer=False, kda_safe_gate=False)
    assert error(logits_by_reference(folder), logits_by_transformers(folder)) < TOLERANCE


def test_layers_that_the_config_does_not_count_are_dropped_where_a_family_has_such(
    tmp_path, caplog
) -> None:
    """GLM's for further tokens (MTP); any other layer too many is told, and the loop refuses it."""
    options = {**DECODERS["glm4_moe"], "first_k_dense_replace": 0}
    for family, runs, more in (("glm4_moe", True, options), ("llama", False, {})):
        folder = tiny_model(family, tmp_path / family, tokenizer=False, **more)
        settings = settings_of(folder)
        fewer = {"num_hidden_layers": settings["num_hidden_layers"] - 1}
        (folder / "config.json").write_text(json.dumps(settings | fewer))
        caplog.clear()
        with caplog.at_level("INFO", "radixcache"), suppress(ModelError):
            assert isinstance(load_model(folder, device="cpu"), Decoder) == runs
        assert ("layers.1" in caplog.text) != runs


def test_layers_that_share_keys_take_no_memory(tmp_path) -> None:
    """In the shape of Gemma 4 E4B, 18 of 42 layers."""
    e4b = {
        "num_hidden_layers": 42, "num_kv_shared_layers": 18, "num_key_value_heads": 2,
        "head_dim": 256, "hidden_size": 2560, "intermediate_size": 10240,
    }  # fmt: skip
    settings = AutoConfig.for_model("gemma4_text", **e4b).to_dict()
    described = describe(settings)
    shapes = [LayerShape(k.kv_heads, k.head_dim, k.value_dim) for k in described.kinds]
    assert len(described.layers) == 42 and [s.key_dim for s in shapes].count(512) == 4
    assert bytes_per_token(shapes, torch.bfloat16) == (20 * 256 + 4 * 512) * 2 * 2 * 2
    assert [layer.shares_kv for layer in described.layers] == [False] * 24 + [True] * 18
    wider = describe({**settings, "use_double_wide_mlp": True})
    for one, widths in ((described, [10240] * 42), (wider, [10240] * 24 + [20480] * 18)):
        assert [one.layer_shapes(number)["up"][0] for number in range(42)] == widths
    folder = tiny_model("gemma4_text", tmp_path, tokenizer=False, **DECODERS["gemma4_text"])
    kept = 3 * 2 * 16 + 32  # of 7 layers
    assert load_model(folder, device="cpu").bytes_per_token == kept * 2 * 4
    other = {number: {"head_dim": 512} for number in range(5, 42, 6)} | {23: {"head_dim": 128}}
    for wrong, reason in (
        ({"num_kv_shared_layers": 42}, "its 42 last layers share keys that no layer has"),
        ({"num_kv_shared_layers": 50}, "its 50 last layers share keys that no layer has"),
        ({"num_kv_shared_layers": 38}, "its 38 last layers share keys that no layer has"),
        ({"num_kv_shared_layers": -1}, "its num_kv_shared_layers is -1"),
        ({"per_layer_config": other}, "its layers share keys of other heads"),
        ({"vocab_size_per_layer_input": 260}, "its vocab_size_per_layer_input is 260"),
    ):
        with pytest.raises(Unknown, match=reason):
            describe({**settings, **wrong})


def test_keys_of_layers_that_share_others_are_not_read(tmp_path) -> None:
    """The hub's checkpoints have them."""
    folder = tiny_model("gemma4_text", tmp_path, tokenizer=False, **DECODERS["gemma4_text"])
    expected, at = logits_by_reference(folder), "model.layers.4.self_attn."
    parts = {"k_proj": (32, 64), "v_proj": (32, 64), "k_norm": (16,)}
    new = {f"{at}{name}.weight": torch.ones(shape) for name, shape in parts.items()}
    assert torch.equal(logits_by_reference(changed(folder, new)), expected)
    refused(changed(folder, {f"{at}z_proj.weight": torch.ones(3)}), f"it has {at}z_proj")


def test_a_table_of_inputs_stays_in_its_dtype(tmp_path) -> None:
    folder = tiny_model("gemma4_text", tmp_path, tokenizer=False, **DECODERS["gemma4_text"])
    name = "model.embed_tokens_per_layer.weight"
    narrow = load_file(folder / "model.safetensors")[name].bfloat16()
    with read(changed(folder, {name: narrow})) as (_, weights):
        assert torch.equal(weights.per_layer()["table"], narrow)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts_per_tok": 9}, {"num_experts_per_tok": 5}, {"n_group": 3}, {"n_group": 8},
        {"topk_group": 5},
    ],
)  # fmt: skip
def test_experts_that_cannot_be_chosen_are_refused(wrong, tmp_path) -> None:
    folder = tiny_model("glm4_moe", tmp_path, tokenizer=False, **DECODERS["glm4_moe"])
    with pytest.raises(Unknown, match="it chooses"):
        describe({**settings_of(folder), **wrong})
    for active, groups, kept in ((7, 1, 1), (2, 4, 1), (2, 3, 4), (2, 6, 2), (0, 1, 1), (2, 0, 0)):
        with pytest.raises(Unknown, match="it chooses"):
            Experts(6, active, MLP(8), groups=groups, kept_groups=kept)


def test_equal_scores_choose_the_experts_with_the_lower_numbers() -> None:
    """As the loop does; torch's topk takes any."""
    for groups, kept in ((1, 1), (16, 3)):
        experts = Experts(64, 5, MLP(8), groups=groups, kept_groups=kept)
        assert choose(experts, torch.zeros(1, 64), None)[1].tolist() == [[*range(5)]]


def test_a_complete_config_is_read_without_transformers_classes(tmp_path, monkeypatch) -> None:
    """Whose import takes longer than the rest of a start."""
    monkeypatch.setattr(module, "complete", None)
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        config = AutoConfig.for_model(family, num_hidden_layers=2)
        assert describe(config.to_dict()).family == family
    windows = {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 9}
    qwen = AutoConfig.for_model("qwen2", num_hidden_layers=3, **windows).to_dict()
    del qwen["layer_types"]  # which are newer than these
    for more in ({}, {"layer_types": None}):
        assert [kind.window for kind in describe({**qwen, **more}).kinds] == [None, 9, 9]
    gemma = AutoConfig.for_model("gemma2", num_hidden_layers=2).to_dict()
    del gemma["hidden_activation"]
    assert describe(gemma, whole=True).layers[1].mlp == MLP(9216, "gelu_tanh")
    with pytest.raises(Unknown, match="does not make sense"):
        describe({"model_type": "llama"})


def test_long_rope_is_that_of_the_longest_sequence(caplog) -> None:
    caplog.set_level("INFO", "radixcache")
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    settings = AutoConfig.for_model(
        "phi3", hidden_size=64, num_attention_heads=4, original_max_position_embeddings=32,
        max_position_embeddings=128, rope_parameters={"rope_type": "longrope", **factors},
    ).to_dict()  # fmt: skip
    short, long = (describe(settings, length) for length in (32, 33))
    assert (short.max_context, long.max_context) == (32, 128)
    assert caplog.text.count("32 tokens at most") == 1
    assert torch.equal(short.ropes[0].frequencies, 2 * long.ropes[0].frequencies)
    assert short.ropes[0].scale > 1


def test_experts_of_the_hub_in_one_tensor(tmp_path) -> None:
    """And beside what no text needs, below the name of a model that takes images."""
    folder = tiny_model("qwen3_5_moe_text", tmp_path, tokenizer=False)
    expected, stored = logits_by_transformers(folder), load_file(folder / "model.safetensors")
    new = {"mtp.fc.weight": torch.ones(3), "model.visual.weight": torch.ones(3)}
    for name, tensor in stored.items():
        if ".experts." not in name:
            new[name.replace("model.", "model.language_model.")] = tensor
    for layer in range(4):
        below = f"layers.{layer}.mlp.experts"

        def experts(part: str, below: str = below) -> torch.Tensor:
            names = [f"model.{below}.{n}.{part}_proj.weight" for n in range(4)]
            return torch.stack([stored[name] for name in names])

        both = torch.cat([experts("gate"), experts("up")], 1)
        new[f"model.language_model.{below}.gate_up_proj"] = both
        new[f"model.language_model.{below}.down_proj"] = experts("down")
    changed(folder, new, "model.")
    assert error(logits_by_reference(folder), expected) < TOLERANCE


@pytest.mark.parametrize("at", ["moe.experts", "experts", "experts.switch_glu"])
def test_experts_of_gemma_4_one_by_one_or_as_mlx_has_them(at: str, tmp_path: Path) -> None:
    folder = tiny_model("gemma4_text", tmp_path, tokenizer=False, **DECODERS["gemma4_text"])
    expected, new = logits_by_reference(folder), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, fused = name.partition("experts.")
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
        for part, found in zip(parts, tensor.chunk(len(parts), 1), strict=True) if fused else ():
            if at.endswith("glu"):
                new[f"{layer}{at}.{part}.weight"] = found.contiguous()
            else:
                new |= {f"{layer}{at}.{n}.{part}.weight": one for n, one in enumerate(found)}
    without = [f"model.layers.{number}.experts." for number in range(7)]
    assert torch.equal(logits_by_reference(changed(folder, new, *without)), expected)


def test_mxfp4_is_read_to_the_bit_and_told(tmp_path) -> None:
    folder = tiny_model("gpt_oss", tmp_path, tokenizer=False, **DECODERS["gpt_oss"])
    generator, at = torch.Generator().manual_seed(0), "model.layers.{}.mlp.experts."
    sizes, new = {"gate_up": (8, 192, 2, 16), "down": (8, 64, 3, 16)}, {}
    for n, (name, size) in product((0, 1), sizes.items()):
        stem = f"{at.format(n)}{name}_proj"
        new[f"{stem}_bias"] = torch.ones(size[:2])
        new[f"{stem}_blocks"] = torch.randint(256, size, generator=generator).byte()
        new[f"{stem}_scales"] = torch.randint(119, 124, size[:3], generator=generator).byte()
    settings = {**settings_of(folder), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(settings))
    changed(folder, new, *map(at.format, (0, 1)))
    with open_checkpoint(folder, torch.device("cpu"), torch.float32) as stored:
        checkpoint = QuantizedCheckpoint(stored, folder, quantization_of(folder, settings))
        layer = SafetensorsSource(checkpoint, describe(settings)).layer(0)
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        pair = (new[f"{at.format(0)}{name}_{end}"] for end in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(*pair, dtype=torch.float32).transpose(1, 2)
        for number, part in enumerate(parts):
            for expert, weight in enumerate(layer[f"experts.{part}"]):
                assert isinstance(weight, Quantized)
                assert torch.equal(weight.dense(), expected[expert, number :: len(parts)])
    model = load_model(folder, device="cpu")
    assert isinstance(model, Decoder)
    told = " of MXFP4 in 4.2 bits a weight (embed_tokens, k_proj, lm_head, o_proj, q_proj, router, "
    assert model.kept == f"{told}v_proj not quantised)"
    lost = f"{at.format(1)}down_proj"
    changed(folder, {}, f"{lost}_scales")
    with pytest.raises(ModelError, match=rf"by mxfp4 \({lost} has blocks in U8\)"):
        load_model(folder, device="cpu")


def test_what_a_checkpoint_may_have_and_what_not(tmp_path) -> None:
    folder = tiny_model("glm4_moe", tmp_path, tokenizer=False, **DECODERS["glm4_moe"])
    ones, at = torch.ones(3), "model.layers.0.self_attn."
    spare = ("model.layers.2.eh_proj.weight", "model.mtp_norm.weight", f"{at}rotary_emb.inv_freq")
    with read(changed(folder, {name: torch.ones(3) for name in spare})):
        pass
    refused(changed(folder, {f"{at}magic": ones}), "other weights: it has model.*magic")
    wrong = changed(folder, {f"{at}q_proj.weight": ones}, f"{at}magic")
    refused(wrong, r"q_proj.weight as \[3\], where its config says \[64, 64\]", ModelError)
    refused(changed(folder, {}, f"{at}q_proj.weight"), "it lacks q in layer 0")
    whole = {f"{at}q_proj.weight": torch.ones(64, 64, dtype=torch.int8)}
    reading, raises = read(changed(folder, whole)), pytest.raises(ModelError, match="in int8")
    with reading as (_, weights), raises:
        weights.layer(0)
    fused = tiny_model("phi3", tmp_path / "phi3", tokenizer=False)
    wrong = changed(fused, {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(3, 64)})
    refused(wrong, "where its config says", ModelError)
    for family, name in (
        ("gpt_oss", "mlp.experts.down_proj_bias"),
        ("qwen3_next", "linear_attn.in_proj_ba.weight"),
    ):
        other = tiny_model(family, tmp_path / family, **DECODERS[family])
        wrong = changed(other, {f"model.layers.0.{name}": torch.tensor(1.0)})
        refused(wrong, rf"{name} as \[\], where its config says", ModelError)
    granite = tiny_model("granitemoe", tmp_path / "granite", **DECODERS["granitemoe"])
    at = "model.layers.1.block_sparse_moe."
    for count in (0, 9):
        new = {f"{at}output_linear.weight": torch.ones(count, 64, 96)}
        reason = rf"as \[{count}, 64, 96\], where its config says \[8, 64, 96\]"
        refused(changed(granite, new), reason, ModelError)
    refused(changed(granite, {}, "model.embed"), r"it lacks embed_tokens.weight")


def test_vectors_are_float32_of_what_counts(tmp_path) -> None:
    """Of the step's dtype as transformers rounds them, but for 1 + w, whose w is small."""
    for family, offset in (("llama", 0.0), ("gemma2", 1.0)):
        folder = tiny_model(family, tmp_path / family, tokenizer=False, **DECODERS[family])
        stored = load_file(folder / "model.safetensors")
        norm = stored["model.layers.0.input_layernorm.weight"]
        with read(folder, torch.bfloat16) as (_, weights):
            layer = weights.layer(0)
        assert torch.equal(layer["input_norm"], norm + 1 if offset else norm.bfloat16().float())
        assert layer["q"].dtype == torch.bfloat16
    with read(changed(folder, {n: t.bfloat16() for n, t in stored.items()})) as (_, weights):
        layer = weights.layer(0)
    assert (layer["q"].dtype, layer["input_norm"].dtype) == (torch.bfloat16, torch.float32)


def test_rows_of_the_head_are_those_of_all_logits(tmp_path) -> None:
    folder = tiny_model("cohere2", tmp_path, tokenizer=False, **DECODERS["cohere2"])
    rows, whole = torch.tensor([7, 0, 259]), logits_by_reference(folder)
    with read(folder) as (architecture, weights):
        of = architecture, TOKENS, weights
        some = reference.rounded_logits(*of, torch.float32, rows)
        torch.testing.assert_close(some, whole[:, rows])
        assert (
            1e-4 < error(reference.rounded_logits(*of, torch.bfloat16, rows), whole[:, rows]) < 0.1
        )
