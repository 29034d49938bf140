"""Writes a tiny model as GGUF as llama.cpp's converter does: names, orders of rows, added ones.

The names are those of the package `gguf`, which the converter uses, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.helpers.gguf.files import Stored, gguf_bytes

_TURNS = ["sliding_attention", "full_attention"]
_THREE_OF_FOUR = {
    "num_hidden_layers": 4, "layer_types": [_TURNS[0]] * 3 + _TURNS[1:], "sliding_window": 11,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}

_ROTATED = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
_SIZES = {"v_head_dim": 24, "qk_rope_head_dim": 8, "head_dim": 8}

# llama.cpp's names by ours, and what the tiny models have beside `tests.helpers.models`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("llama", _LOCAL),
    "arcee": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "ministral3": ("mistral3", {"sliding_window": None, "rope_parameters": {
        **_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"rope_parameters": _YARN}),
    "qwen2_vl": ("qwen2vl", {}),
    "qwen2_5_vl": ("qwen2vl", {}),
    "qwen3_vl": ("qwen3vl", {}),
    "qwen2_moe": ("qwen2moe", _SHARED),
    "qwen3_moe": ("qwen3moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3_vl_moe": ("qwen3vlmoe", {}),
    "gemma": ("gemma", _TIED),
    "gemma2": ("gemma2", {**_TIED, "query_pre_attn_scalar": 16, "num_hidden_layers": 3,
               "layer_types": [*_TURNS, _TURNS[0]]}),
    "gemma3_text": ("gemma3", {**_TIED, "num_hidden_layers": 7, "query_pre_attn_scalar": 16,
        "layer_types": [_TURNS[0]] * 5 + [*_TURNS[1:], _TURNS[0]], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }}),
    "gemma4_text": ("gemma4", {**_TIED, "sliding_window": 11, "layer_types": _TURNS * 3,
        "hidden_size_per_layer_input": 16, "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0, "num_hidden_layers": 6,
        "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "vocab_size_per_layer_input": 260,
    }),
    "phi3": ("phi3", {"sliding_window": 9, "partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {**_THREE_OF_FOUR, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": _YARN,
    }}),
    "exaone4": ("exaone4", _THREE_OF_FOUR),
    "exaone_moe": ("exaone-moe", {**_GROUPS, **_THREE_OF_FOUR, "n_routed_experts": None,
        "num_experts": 8, "num_shared_experts": 2, "n_shared_experts": None,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "routed_scaling_factor": 1.7}),
    "glm4": ("glm4", {"attention_bias": True}),
    "cohere": ("command-r", {**_TIED, "logit_scale": 0.25}),
    "cohere2": ("cohere2", {**_TIED, **_THREE_OF_FOUR, "logit_scale": 0.25}),
    "granite": ("granite", _SCALES),
    "granitemoe": ("granitemoe", {**_LOCAL, **_SCALES}),
    "granitemoehybrid": ("granitehybrid", _SCALES),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "use_sliding_window": False}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5-moe", {"moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 3,
        "moe_intermediate_size": 48, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        "moe_num_shared_experts": 1}),
    "seed_oss": ("seed_oss", {}),
    "gpt_oss": ("gpt-oss", {**_LOCAL, "sliding_window": 11, "layer_types": _TURNS,
                "rope_parameters": {**_YARN, "truncate": False}}),
    "glm4_moe": ("glm4moe", {**_GROUPS, "use_qk_norm": True, "routed_scaling_factor": 1.7}),
    "glm4v_moe": ("glm4moe", {"num_key_value_heads": 4}),
    "solar_open": ("glm4moe", {**_GROUPS, "first_k_dense_replace": None, "attention_bias": True}),
    "deepseek_v2": ("deepseek2", {**_GROUPS, **_SIZES, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7, "rope_parameters": _ROTATED}),
    "deepseek_v3": ("deepseek2", {**_GROUPS, **_SIZES, "rope_parameters": _ROTATED}),
    "glm4_moe_lite": ("deepseek2", {**_GROUPS, **_SIZES, "q_lora_rank": None}),
    "youtu": ("deepseek2", {**_TIED, **_SIZES}),
    "mistral4": ("mistral4", {**_GROUPS, **_SIZES, "head_dim": 24, "rope_parameters": {
        **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }}),
    "kimi_linear": ("kimi-linear", {"v_head_dim": 24, "linear_head_dim": 32}),
    "dots1": ("dots1", {**_GROUPS, "num_key_value_heads": 4}),
    "minimax_m2": ("minimax-m2", {**_LOCAL, "rotary_dim": 8}),
    "olmoe": ("olmoe", {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_next": ("qwen3next", {"norm_topk_prob": True}),
    "qwen3_5_text": ("qwen35", {}),
    "qwen3_5_moe_text": ("qwen35moe", {}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2moe", {**_TIED, "shared_expert_intermediate_size": None}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h of experts": ("nemotron_h_moe", {**_GROUPS, "first_k_dense_replace": None,
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 32, "norm_topk_prob": True,
        "routed_scaling_factor": 1.7}),
}  # fmt: skip
_CONVERTED = {"llama", "mixtral", "ministral3", "granite", "granitemoe", "granitemoehybrid"}
_CONVERTED |= {"arcee", "smollm3", "nemotron_h"}
_MAMBA = {"granitemoehybrid": 1, "nemotron_h": 2}  # groups
_ONE_ADDED = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SAYS_PATTERN = ("gemma4_text", "olmo3", "exaone4", "exaone_moe")
_SCORED = (
    "nemotron_h", "kimi_linear", "glm4_moe", "glm4v_moe", "solar_open", "dots1", "exaone_moe",
    "deepseek_v3", "glm4_moe_lite", "deepseek_v2", "mistral4",
)  # fmt: skip
_SIGMOID = (*_SCORED[:-2], "lfm2_moe", "minimax_m2")
_SIDES = ("key", "value")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu", "kimi_linear")
_SECTIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")

# Keys by settings; of several settings, a config has one.
_KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "num_hidden_layers": "block_count",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_k": "expert_used_count",
    "top_k_experts": "expert_used_count", "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "moe_intermediate_size": "expert_feed_forward_length", "logit_scale": "logit_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_layer_start_index": "leading_dense_block_count", "num_dense_layers":
    "leading_dense_block_count", "moe_layer_interval": "interleave_moe_layer_step",
    "moe_num_shared_experts": "expert_shared_count", "conv_L_cache": "shortconv.l_cache",
    "attn_logit_softcapping": "attn_logit_softcapping", "logits_scaling": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count", "mamba_n_heads": "ssm.time_step_rank",
    "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count", "mamba_num_heads": "ssm.time_step_rank",
    "model_max_length": "context_length", "num_experts_per_token": "expert_used_count",
    "linear_head_dim": "kda.head_dim",
}  # fmt: skip
_SCORED_KEYS = {
    "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm", "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count", "num_expert_group": "expert_group_count",
}  # fmt: skip


def convert(
    folder: Path, path: Path, kind: str = "F32", older: bool = False, **changes: Any
) -> Path:
    """Write the model of a folder to `path`; `changes` are keys, or None to leave them out. Of
    another `kind` are the matrices whose rows have whole blocks of 32. `older` converters left the
    kv_b of MLA whole, and said the sizes of its heads."""
    whole = AutoConfig.from_pretrained(folder)
    family, config = whole.model_type, SimpleNamespace(**whole.get_text_config().to_dict())
    config.older = older
    scored = family == "nemotron_h" and "moe" in config.layers_block_type
    name = "nemotron_h_moe" if scored else FAMILIES[family][0]
    keys = {f"{name}.{key}": value for key, value in _metadata(family, config).items()}
    metadata = {"general.architecture": name, "tokenizer.ggml.eos_token_id": 257, **keys, **changes}
    names = gguf.get_tensor_name_map(
        next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name),
        16,
    )
    tensors = {}
    for stored, weight in _weights(family, config, load_file(folder / "model.safetensors")):
        found = names.get_name(stored, (".weight", ".bias"))
        found = found or names.get_name(stored.removeprefix("model."), (".weight",))
        found = found or (stored if stored.endswith(".scale") else None)
        assert found, stored
        data = weight.float().contiguous()
        if re.search(r"ssm_[ad]$|ssm_norm", found) and family in _MAMBA:
            data = data.view(-1, 1) if "norm" not in found else data.view(_MAMBA[family], -1)
        fits = data.ndim > 1 and data.shape[-1] % 32 == 0 and not re.search("ssm_|bias$", found)
        stored_as = kind if fits else "F32"
        blocks = gguf.quants.quantize(data.numpy(), gguf.GGMLQuantizationType[stored_as])
        tensors[found] = Stored(stored_as, tuple(data.shape), blocks.tobytes())
    if family == "gemma4_text":
        divisors = torch.tensor([1.0] * 4 + [1e30] * 12)
        tensors["rope_freqs.weight"] = Stored("F32", (16,), divisors.numpy().tobytes())
    said = {key: value for key, value in metadata.items() if value is not None}
    path.write_bytes(gguf_bytes(said, tensors))
    return path


def _metadata(family: str, config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting, key in (_KEYS | _SCORED_KEYS if family in _SCORED else _KEYS).items():
        if (value := getattr(config, setting, None)) is not None:
            found[key] = value
    if not found.get("expert_count"):
        found = {key: value for key, value in found.items() if not key.startswith("expert")}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    full = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    rope = getattr(config, "rope_parameters", None) or {}
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found["rope.freq_base"] = rope.get("rope_theta", 10_000.0)
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
        found |= {f"rope.scaling.yarn_{n}": rope[n] for n in ("beta_fast", "beta_slow")}
    if "llama_4_scaling_beta" in rope:
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if family in _LATENT:
        rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
        found |= {"attention.kv_lora_rank": rank, "attention.head_count_kv": 1}
        if family in _SIGMOID:
            found["expert_gating_func"] = 2
        if config.q_lora_rank:
            found["attention.q_lora_rank"] = config.q_lora_rank
        if family == "kimi_linear":
            attends = [int(t == "full_attention") for t in config.layer_types]
            found["attention.head_count_kv"] = attends
        if family in ("glm4_moe_lite", "kimi_linear"):
            found["leading_dense_block_count"] = config.mlp_layer_types.count("dense")
        if family == "youtu":
            found |= {"leading_dense_block_count": 2, "expert_shared_count": 0}
            found["expert_feed_forward_length"] = config.intermediate_size
        if "mscale_all_dim" in rope:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
        found.pop("attention.temperature_scale", None)  # which the converter leaves out
        pair = config.qk_nope_head_dim + turned, config.v_head_dim
        full = {f"attention.{side}_length": n for side, n in zip(_SIDES, pair, strict=True)}
        if config.older:
            found["attention.head_count_kv"] = config.num_attention_heads
        else:
            full = {f"{key}_mla": size for key, size in full.items()}
            full |= {"attention.key_length": rank + turned, "attention.value_length": rank}
        return {**found, **full, "rope.dimension_count": turned}
    turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    types = getattr(config, "layer_types", None) or []
    if family == "gemma4_text":
        full = {"attention.key_length": 32, "attention.value_length": 32}
        found |= {"attention.key_length_swa": head_dim, "attention.value_length_swa": head_dim}
        heads = [config.num_key_value_heads if t == _TURNS[0] else 1 for t in types]
        found |= {"attention.head_count_kv": heads, "rope.dimension_count_swa": head_dim}
        own = len(types) - config.num_kv_shared_layers
        wide = config.intermediate_size * (1 + config.use_double_wide_mlp)
        sizes = [config.intermediate_size if i < own else wide for i in range(len(types))]
        found["feed_forward_length"] = sizes if own < len(types) else sizes[0]
        turned = 32
    if family in _SAYS_PATTERN:
        found["attention.sliding_window_pattern"] = [t == _TURNS[0] for t in types]
    if family == "ernie4_5_moe":
        found["expert_shared_feed_forward_length"] = config.moe_intermediate_size
    if family in _SECTIONS:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if family.startswith("qwen3_vl"):
        found["n_deepstack_layers"] = 1
    if family == "exaone_moe":
        found["leading_dense_block_count"] = config.mlp_layer_types.count("dense")
    if family == "dots1":  # its config has a window that no layer uses
        del found["attention.sliding_window"]
    if family in _SIGMOID:
        found["expert_gating_func"] = 2
    if family in ("minimax_m2", "gpt_oss"):
        found["expert_feed_forward_length"] = config.intermediate_size
    if "linear_attention" in types and family != "granitemoehybrid":
        found["attention.recurrent_layers"] = [t == "linear_attention" for t in types]
        inner = config.linear_value_head_dim * config.linear_num_value_heads
        found["ssm.inner_size"] = inner
    if family.startswith("qwen3_5"):
        found["rope.dimension_sections"] = [1, 1, 0, 0]
    if family in ("lfm2", "lfm2_moe", "granitemoehybrid"):
        attends = [n if t == "full_attention" else 0 for t in types for n in [2]]
        found["attention.head_count_kv"] = attends
    if family == "granitemoehybrid":
        found |= {"ssm.inner_size": 128, "rope.scaling.finetuned": False}
    if family == "nemotron_h":
        blocks = config.layers_block_type
        found["attention.head_count_kv"] = [
            2 * (b in ("attention", "full_attention")) for b in blocks
        ]
        inner, scored = config.intermediate_size, "moe" in blocks
        if scored:
            inner, found["moe_latent_size"] = config.moe_intermediate_size, config.moe_latent_size
            found["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
        else:
            found = {k: v for k, v in found.items() if not k.startswith("expert")}
        found["feed_forward_length"] = [inner * (b in ("mlp", "moe")) for b in blocks]
        found["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
        found |= {"block_count": len(blocks)} | {
            "ssm.inner_size": 128,
            "rope.scaling.finetuned": False,
        }
    return {**found, **full, "rope.dimension_count": turned}


def _weights(
    family: str, config: Any, stored: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of saved states or, where several become one or one becomes several, of files."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(stored, key=lambda n: [int(x) if x.isdigit() else x for x in n.split(".")]):
        weight, name = stored[name], name.replace(".language_model.", ".")
        if "visual." in name:
            continue
        block = f"blk.{match[1]}." if (match := re.search(r"layers\.(\d+)\.", name)) else ""
        if family in _ONE_ADDED and re.search(r"norm\.weight$", name):
            weight = weight + ("linear_attn.norm" not in name)
        if family in _CONVERTED and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            weight = _swap(weight, 0, heads, 2)
        if family.startswith("qwen3_5") and "linear_attn." in name:
            weight = _tiled(name, weight, config)
        if name.endswith("A_log"):
            weight = -weight.exp()
        if re.search(r"\.experts\.\d+\.", name):
            experts.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(weight)
        elif match := re.search(r"router\.(scale|per_expert_scale)$", name):
            part = "ffn_gate_inp" if match[1] == "scale" else "ffn_down_exps"
            yield f"{block}{part}.scale", weight
        elif name.endswith("kv_b_proj.weight") and not config.older:
            nope, value = config.qk_nope_head_dim, config.v_head_dim
            keys, values = weight.unflatten(0, (-1, nope + value)).split([nope, value], 1)
            yield name.replace("kv_b", "k_b"), keys.mT
            yield name.replace("kv_b", "v_b"), values
        elif match := re.search(r"\.in_proj_qkvz", name):
            each = config.linear_num_value_heads // config.linear_num_key_heads
            sizes = [16, 16, 16 * each, 16 * each]
            parts = weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1)
            flat = [part.flatten(0, 1) for part in parts]
            yield f"{block}attn_qkv.weight", torch.cat(flat[:3])
            yield f"{block}attn_gate.weight", flat[3]
        elif match := re.search(r"experts\.(gate_up|down)_proj(_bias)?$", name):
            end, gpt_oss = "bias" if match[2] else "weight", family == "gpt_oss"
            if family == "gemma4_text":
                yield f"{block}ffn_{match[1]}_exps.weight", weight
                continue
            weight = weight.mT if gpt_oss and end == "weight" else weight
            half = weight.shape[1] // 2
            if match[1] == "down":
                yield f"{block}ffn_down_exps.{end}", weight
                continue
            yield f"{block}ffn_gate_exps.{end}", weight[:, ::2] if gpt_oss else weight[:, :half]
            yield f"{block}ffn_up_exps.{end}", weight[:, 1::2] if gpt_oss else weight[:, half:]
        elif match := re.search(r"(block_sparse_moe|shared_mlp)\.input_linear", name):
            end = "_exps" if match[1] == "block_sparse_moe" else ""
            gate, up = weight.chunk(2, -2)
            yield f"{block}ffn_gate{end}.weight", gate
            yield f"{block}ffn_up{end}.weight", up
        elif "shared_mlp.output_linear" in name:
            yield f"{block}ffn_down.weight", weight
        else:
            name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
            name = re.sub(r"(e_score_correction)_bias$", r"\1.bias", name)
            name = re.sub(r"(expert_bias)$", r"\1.bias", name)
            name = re.sub(r"(sinks|layer_scalar)$", r"\1.weight", name)
            if ".mixer." in name or family == "nemotron_h":
                name = name.replace("model.layers.", "backbone.layers.")
            if family == "kimi_linear":
                name = re.sub(r"block_sparse_moe\.(\w+_proj\.)", r"mlp.\1", name)
            yield name, weight if family == "kimi_linear" else weight.squeeze()
    for name, parts in experts.items():
        if family == "mixtral":
            name = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", name)
        if family == "nemotron_h":
            name = name.replace("mixer", "mlp").replace("backbone", "model")
        yield name, torch.stack(parts)


def _swap(weight: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """With the last two of `sizes` and what remains of a dimension in the other order."""
    at = dim + len(sizes) - 1
    return weight.unflatten(dim, (*sizes, -1)).transpose(at, at + 1).flatten(dim, at + 1)


def _tiled(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Value heads ordered by their place within a key head first."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim = 1 if "out_proj" in name else 0
    before = 2 * keys * 16 if "in_proj_qkv." in name or "conv1d" in name else 0
    if not re.search(r"in_proj|conv1d|A_log|dt_bias|out_proj", name):
        return weight
    start, values = weight.split([before, weight.shape[dim] - before], dim)
    tiled = values.unflatten(dim, (keys, heads // keys, -1)).transpose(dim, dim + 1)
    return torch.cat([start, tiled.flatten(dim, dim + 2)], dim)
