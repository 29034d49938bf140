"""Each row of the table of families against transformers' own model, as it is saved and read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.configuration_auto import model_type_to_module_name

from radixcache.errors import ModelError
from radixcache.kernels.quantized import Quantized
from radixcache.kernels.spec import (
    MLP,
    Architecture,
    DeltaNet,
    Experts,
    Latent,
    Unknown,
)
from radixcache.kernels.torch.experts import choose
from radixcache.runtime.model import reference
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families import config
from radixcache.runtime.model.families import describe as module
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.families.table import FAMILIES, WRAPPERS
from radixcache.runtime.model.kv_pool import LayerShape, bytes_per_token
from radixcache.runtime.model.load import load_model
from tests.helpers.decoders import DECODERS
from tests.helpers.models import MULTIMODAL, auto_class, tiny_model
from tests.helpers.native import needs_kernels
from tests.runtime.model.faults import faults
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


def test_settings_of_the_hub_that_transformers_does_not_save(tmp_path) -> None:
    def with_settings(family: str, more: Mapping[str, Any], **options: Any) -> Architecture:
        folder = tiny_model(family, tmp_path / family, tokenizer=False, **options)
        return describe({**settings_of(folder), **more})

    for name in ("layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size"):
        with_settings("minimax_m2", {name: 96}, **DECODERS["minimax_m2"])
    with_settings("ernie4_5_moe", {"moe_gate": "topk"}, **DECODERS["ernie4_5_moe"])
    attends = {"num_local_experts": 0, "layer_types": ["attention"] * 2, "num_hidden_layers": 2}
    assert len(with_settings("granitemoehybrid", attends, shared_intermediate_size=96).kinds) == 2
    images = settings_of(tiny_model("qwen2_5_vl", tmp_path / "vl", tokenizer=False))
    text = images.pop("text_config") | {"vision_token_id": 3, "model_type": "qwen2_5_vl"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = {**images, **text, "rope_theta": 1e4}
    del flat["rope_parameters"], flat["head_dim"]
    assert describe(flat).family == "qwen2_5_vl_text"
    with pytest.raises(Unknown, match="its config has magic"):
        describe({**flat, "magic": 2.0})


def test_kimi_linear_of_the_hub_and_what_kimi_k3_has_beside() -> None:
    """The settings of Kimi-Linear-48B-A3B, of four of its layers."""
    kda = {
        "full_attn_layers": [4], "head_dim": 128, "kda_layers": [1, 2, 3], "num_heads": 32,
        "short_conv_kernel_size": 4,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72,
        "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
        "linear_attn_config": kda, "mla_use_nope": True, "model_max_length": 1048576,
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 4,
        "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128,
        "vocab_size": 163840, "auto_map": {}, "pad_token_id": 163839,
    }  # fmt: skip
    *deltas, latent = (layer.mixer for layer in describe(settings).layers)
    assert deltas == [DeltaNet(4, 32, 32, 128, 128, by_channel=True, rank=128)] * 3
    assert isinstance(latent, Latent) and latent.rope is None and not latent.gated
    for wrong in (
        {"mla_use_nope": False}, {"mla_use_output_gate": True}, {"routed_expert_hidden_size": 9},
        {"moe_router_activation_func": "softmax"}, {"hidden_act": "situ"},
        {"linear_attn_config": {**kda, "gate_lower_bound": -5.0}},
    ):  # fmt: skip
        with pytest.raises(Unknown):
            describe({**settings, **wrong})


@pytest.mark.parametrize(("family", "wrong", "reason"), [
    ("bailing_hybrid", {"kda_lower_bound": 0.0}, "its kda_lower_bound is 0.0"),
    ("nemotron_h", {"mlp_bias": True}, "a latent space with biases"),
])  # fmt: skip
def test_settings_that_no_loop_computes_leave_it(family, wrong, reason, tmp_path) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False, **DECODERS[family])
    with pytest.raises(Unknown, match=reason):
        describe({**settings_of(folder), **wrong})
    if family == "bailing_hybrid":  # without a bound, decays are those of Kimi Linear
        folder = tiny_model(family, tmp_path, tokenizer=False, kda_safe_gate=False)
        assert error(logits_by_reference(folder), logits_by_transformers(folder)) < TOLERANCE


def test_settings_that_change_nothing_and_those_that_may() -> None:
    """The latter leave the loop; gates of a kind that transformers does not compute are refused."""
    known: dict[str, dict[str, Any]] = {
        "llama": {
            "is_llama_config": True, "unsloth_fixed": True, "unsloth_version": "2026.1",
            "attention_head_dim": 128, "_attn_implementation_autoset": True, "pruned_heads": {},
            "attn_implementation": "sdpa", "temperature": 0.6, "top_k": 20, "max_length": 20,
            "do_sample": True, "tokenizer_class": "T", "sep_token_id": 3, "image_token_index": 4,
            "task_specific_params": {}, "neftune_noise_alpha": 5, "quantization_config": {},
        },
        "qwen3": {"use_qk_norm": True}, "qwen3_moe": {"use_qk_norm": True},
        "qwen3_vl_moe_text": {"norm_topk_prob": True},
        "qwen3_5_text": {"output_gate_type": "swish"},
        "qwen3_5_moe_text": {"output_gate_type": "silu"},
    }  # fmt: skip
    wrong: dict[str, dict[str, Any]] = {
        "llama": {"attention_head_dim": 64, "use_qk_norm": True, "image_size": 224, "tokens": 3},
        "qwen3": {"use_qk_norm": False}, "qwen3_moe": {"use_qk_norm": 2},
        "qwen3_vl_moe_text": {"norm_topk_prob": False},
        "qwen3_5_text": {"output_gate_type": "sigmoid", "output_gate": "silu"},
        "qwen3_5_moe_text": {"output_gate_type": "sigmoid"},
    }  # fmt: skip
    for family, settings in known.items():
        whole = AutoConfig.for_model(family, num_hidden_layers=4).to_dict()
        assert repr(describe({**whole, **settings})) == repr(describe(whole))
        for name, value in wrong[family].items():
            with pytest.raises(Unknown, match=f"its (config has )?{name}"):
                describe({**whole, name: value})


def test_no_model_of_transformers_reads_what_tools_write() -> None:
    models, read = Path(transformers.__file__).parent / "models", set[str]()
    for family in {*FAMILIES, *WRAPPERS}:
        for code in (models / model_type_to_module_name(family)).glob("modeling_*.py"):
            read.update(re.findall(r"\bconfig(?:\.|, \")(\w+)", code.read_text()))
    assert {"hidden_size", "attention_dropout", "use_qk_norm"} <= read
    assert not read & (config._OF_TOOLS | {"output_gate_type", "attention_head_dim"})


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_gates_that_transformers_does_not_compute_are_refused(family, tmp_path) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False)
    settings = settings_of(folder)
    for gate, runs in (("swish", True), ("sigmoid", False), ("tanh", False)):
        (folder / "config.json").write_text(json.dumps({**settings, "output_gate_type": gate}))
        if runs:
            assert isinstance(load_model(folder), Decoder)
            continue
        with pytest.raises(ModelError, match=f"its output_gate_type is {gate}, which"):
            load_model(folder)


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


def test_mxfp4_is_read_to_the_bit(tmp_path) -> None:
    folder = tiny_model("gpt_oss", tmp_path, tokenizer=False, **DECODERS["gpt_oss"])
    generator, at = torch.Generator().manual_seed(0), "model.layers.0.mlp.experts."
    new = {f"{at}gate_up_proj_bias": torch.ones(8, 192), f"{at}down_proj_bias": torch.ones(8, 64)}
    for name, size in (("gate_up_proj", (8, 192, 2, 16)), ("down_proj", (8, 64, 3, 16))):
        new[f"{at}{name}_blocks"] = torch.randint(256, size, generator=generator).byte()
        new[f"{at}{name}_scales"] = torch.randint(110, 135, size[:3], generator=generator).byte()
    with read(changed(folder, new, at)) as (_, weights):
        layer = weights.layer(0)
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        pair = new[f"{at}{name}_blocks"], new[f"{at}{name}_scales"]
        expected = convert_moe_packed_tensors(*pair, dtype=torch.float32).transpose(1, 2)
        for number, part in enumerate(parts):
            for expert, weight in enumerate(layer[f"experts.{part}"]):
                assert isinstance(weight, Quantized)
                assert torch.equal(weight.dense(), expected[expert, number :: len(parts)])


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
