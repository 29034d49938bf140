"""Settings of config.json that change nothing, and those that may."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name

from radixcache.errors import ModelError
from radixcache.kernels.spec import Architecture, DeltaNet, Latent, Unknown
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families import config
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.families.table import FAMILIES, WRAPPERS
from radixcache.runtime.model.load import load_model
from tests.helpers.decoders import DECODERS
from tests.helpers.models import tiny_model
from tests.helpers.native import needs_kernels
from tests.runtime.model.steps import (
    TOKENS,
    logits_by_reference,
    plain_logits,
    read,
    relative_error,
    settings_of,
)


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


def read_by(family: str) -> set[str]:
    """The settings that transformers' code of a family reads."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(family)
    code = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
    return {*re.findall(r"\bconfig(?:\.|, \")(\w+)", code)}


def test_no_model_of_transformers_reads_what_tools_write() -> None:
    read = set[str]().union(*map(read_by, {*FAMILIES, *WRAPPERS}))
    assert {"hidden_size", "attention_dropout", "use_qk_norm"} <= read
    assert not read & (config._OF_TOOLS | {"output_gate_type", "attention_head_dim"})


# Settings in `Family.ignored` that code reads all the same: to draw weights, for towers, to say
# how it computes; or that the row reads where they count.
_READ = {
    "gemma4_text": "hidden_act moe_intermediate_size num_experts top_k_experts "
    "vocab_size_per_layer_input",
    "phi3": "original_max_position_embeddings",
    "smollm3": "use_sliding_window",
    "youtu": "embedding_initializer_range",
    "qwen3_next": "mlp_only_layers",
    "granitemoehybrid": "mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state "
    "mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias time_step_limit",
    "bamba": "mamba_chunk_size mamba_expand num_logits_to_keep z_loss_coefficient",
    "nemotron_h": "chunk_size intermediate_size moe_intermediate_size "
    "moe_shared_expert_intermediate_size n_group n_routed_experts norm_topk_prob "
    "num_experts_per_tok num_hidden_layers num_logits_to_keep rescale_prenorm_residual "
    "routed_scaling_factor time_step_floor time_step_max topk_group use_mamba_kernels",
}  # fmt: skip


def test_settings_that_a_row_ignores_are_not_read_or_known_to_be() -> None:
    for family, row in FAMILIES.items():
        ignored = {*row.ignored.split()}
        assert ignored & read_by(family) == {*_READ.get(family, "").split()}, family


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "gemma4_text"])
@pytest.mark.parametrize("value", [False, None])
def test_attention_that_is_not_causal_is_refused(family: str, value: Any, tmp_path: Path) -> None:
    """transformers' masks let each token see all."""
    folder = tiny_model(family, tmp_path, tokenizer=False, **DECODERS[family])
    settings = settings_of(folder)
    assert describe({**settings, "is_causal": True})
    (folder / "config.json").write_text(json.dumps({**settings, "is_causal": value}))
    with pytest.raises(Unknown, match="its attention looks at what comes later"):
        describe(settings_of(folder))
    with pytest.raises(ModelError, match="it is an encoder, whose tokens see later ones"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(("family", "name", "value"), [
    ("deepseek_v3", "rope_interleave", None), ("youtu", "rope_interleave", False),
    ("deepseek_v3", "q_lora_rank", 0), ("ernie4_5_moe", "moe_norm_min", 0.9),
])  # fmt: skip
def test_values_that_another_forward_pass_follows_leave_the_loop(
    family: str, name: str, value: Any, tmp_path: Path
) -> None:
    settings = settings_of(tiny_model(family, tmp_path, tokenizer=False, **DECODERS[family]))
    describe(settings)
    with pytest.raises(Unknown):
        describe({**settings, name: value})


@pytest.mark.parametrize("equal", [True, False])
def test_values_are_keys_where_the_config_says_so(equal: bool, tmp_path: Path) -> None:
    """A checkpoint of Gemma 4 with a product more or less than that is another model's."""
    options = {**DECODERS["gemma4_text"], "attention_k_eq_v": equal}
    folder = tiny_model("gemma4_text", tmp_path, tokenizer=False, **options)
    name, keys = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "vk")
    weights = load_file(folder / "model.safetensors")
    assert (name in weights) != equal
    if equal:
        weights[name] = torch.randn_like(weights[keys])
    else:
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reason = f"it has {name}" if equal else "it lacks v in layer 1"
    with pytest.raises(Unknown, match=reason), read(folder):
        pass
    with pytest.raises(ModelError, match=name if equal else "lacks 1 of its weights"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe", "mistral4"])
def test_a_model_none_of_whose_layers_has_experts_runs_in_the_loop(family: str, tmp_path: Path):
    settings = settings_of(tiny_model(family, tmp_path, tokenizer=False, **DECODERS[family]))
    described = describe({**settings, "first_k_dense_replace": settings["num_hidden_layers"]})
    assert not any(layer.experts for layer in described.layers)


@pytest.mark.parametrize(
    ("family", "shared"),
    [("deepseek_v3", "n_shared_experts"), ("kimi_linear", "num_shared_experts")],
)
def test_shared_experts_of_no_size_are_none(family: str, shared: str, tmp_path: Path) -> None:
    """transformers saves their weights, without a number in them."""
    options = {**DECODERS.get(family, {}), shared: 0}
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    assert any(0 in weight.shape for weight in load_file(folder / "model.safetensors").values())
    (plain,) = plain_logits(folder, [TOKENS.numpy()])
    assert relative_error([logits_by_reference(folder)], [plain]) < 1e-4


@pytest.mark.parametrize("length", [True, "x", 32.0, float("nan")])
def test_lengths_that_transformers_does_not_check_are_refused(length: Any, tmp_path: Path) -> None:
    """Its config classes check names of their own, not what those are called in a file."""
    settings = settings_of(tiny_model("bailing_hybrid", tmp_path, tokenizer=False))
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_max_length": length}))
    with pytest.raises(ModelError, match=f"max_position_embeddings is {length}"):
        load_model(tmp_path, device="cpu")


def test_a_model_whose_own_attention_fails_is_refused_in_a_sentence(tmp_path: Path) -> None:
    settings = settings_of(tiny_model("deepseek_v3", tmp_path, tokenizer=False))
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_key_value_heads": 2}))
    with pytest.raises(ModelError, match=r"its own attention does not run \(The size of"):
        load_model(tmp_path, device="cpu")
