"""The table of families: a row says how a family differs from Llama."""

from __future__ import annotations

from typing import Any

from radixcache.runtime.model.description import Unknown
from radixcache.runtime.model.families import parts
from radixcache.runtime.model.families.config import Config
from radixcache.runtime.model.families.family import (
    Family,
    all_windows,
    by_type,
    qwen_windows,
)

_POST = {"attended_norm": "post_attention_layernorm", "after_norm": "post_feedforward_layernorm"}
_BOTH = {"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_POST}
_GLM4 = {
    "input_norm": "input_layernorm", "attended_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm", "after_norm": "post_mlp_layernorm",
}  # fmt: skip
_LFM3 = {
    "input_norm": "operator_norm", "attended_norm": "post_operator_norm", "mlp_norm": "ffn_norm",
    "after_norm": "post_ffn_norm",
}  # fmt: skip
_FIRST = {"input_norm": "input_layernorm"}


def _gemma_scales(config: Config) -> dict[str, Any]:
    if config.maybe("use_bidirectional_attention") not in (None, False, "vision"):
        raise Unknown("its attention looks at what comes later")
    return {
        "embed_scale": config.size("hidden_size") ** 0.5,
        "logit_softcap": config.maybe("final_logit_softcapping"),
    }


def _gemma_scale(config: Config) -> float:
    return config.number("query_pre_attn_scalar") ** -0.5


def _gemma4_heads(config: Config, number: int) -> tuple[int | None, int | None]:
    config.ignore("attention_k_eq_v", "use_double_wide_mlp", "vocab_size_per_layer_input")
    own = {int(n): of for n, of in (config.maybe("per_layer_config") or {}).items()}
    found = own.get(number, {})
    if found.keys() - {"head_dim", "num_key_value_heads"}:
        raise Unknown(f"its layers differ in {', '.join(sorted(found))}")
    if config.maybe("num_kv_shared_layers") or config.maybe("hidden_size_per_layer_input"):
        raise Unknown("its layers share keys, or have embeddings of their own")
    return found.get("num_key_value_heads"), found.get("head_dim")


def _granite_scales(config: Config) -> dict[str, Any]:
    return {
        "embed_scale": config.number("embedding_multiplier"),
        "logit_scale": 1.0 / config.number("logits_scaling"),
    }


def _granite_scale(config: Config) -> float:
    return config.number("attention_multiplier")


def _cohere_scales(config: Config) -> dict[str, Any]:
    return {"logit_scale": config.number("logit_scale")}


def _lfm3_scales(config: Config) -> dict[str, Any]:
    if not (config.flag("use_sandwich_norm") and config.flag("use_attention_gate")):
        raise Unknown("its layers have no norms after their blocks, or no gates")
    return {}


def _windowed(config: Config, number: int, kind: str) -> bool:
    return kind == "sliding_attention"


def _windowed_if_any(config: Config, number: int, kind: str) -> bool:
    return kind == "sliding_attention" or config.maybe("sliding_window") is None


def _smollm3_turned(config: Config, number: int, kind: str) -> bool:
    config.ignore("no_rope_layer_interval", "use_sliding_window", "max_window_layers")
    return bool(config.get("no_rope_layers")[number])


def _has_rope(config: Config, number: int, kind: str) -> bool:
    found: bool = config.get("position_embedding_type") == "rope"
    return found


def _blocks(config: Config) -> list[str]:
    """Nemotron's layers are mixers or MLPs."""
    config.ignore("num_hidden_layers")
    types: list[str] = config.get("layers_block_type")
    return types


def _row(base: dict[str, Any], **more: Any) -> Family:
    return Family(**{**base, **more})


_TANH = ("hidden_activation", "gelu_pytorch_tanh")
_GEMMA: dict[str, Any] = {"offset": 1.0, "scales": _gemma_scales}
_GEMMA2 = {
    **_GEMMA, "norms": _BOTH, "activation": _TANH, "types": by_type, "scale": _gemma_scale,
    "softcaps": True,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "scale": _granite_scale, "scales": _granite_scales, "residual_scale": "residual_multiplier",
}  # fmt: skip
_COHERE: dict[str, Any] = {
    "norms": _FIRST, "parallel": True, "centred": True, "eps": "layer_norm_eps", "pairs": True,
    "scales": _cohere_scales,
}  # fmt: skip
_USE_BIAS: dict[str, Any] = dict.fromkeys(("bias", "out_bias", "mlp_bias"), "use_bias")
_QWEN3_5: dict[str, Any] = {
    "offset": 1.0, "head_norms": "head", "gated": True, "types": by_type, "partial_rope": True,
    "mixer": parts.delta_net,
    "ignored": (
        "attn_output_gate", "full_attention_interval", "mamba_ssm_dtype", "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ),
}  # fmt: skip
_LFM2: dict[str, Any] = {
    "norms": {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}, "head_norms": "head",
    "bias": False, "out_bias": False, "activation": (None, "silu"), "eps": "norm_eps",
    "types": by_type, "mixer": parts.short_conv,
    "ignored": (
        "block_dim", "block_ff_dim", "block_mlp_init_scale", "block_norm_eps",
        "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_dim",
        "conv_dim_out", "conv_use_xavier_init", "full_attn_idxs", "num_heads", "theta",
        "use_pos_enc",
    ),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(
        mlp_bias="mlp_bias", types=all_windows,
        ignored=("max_window_layers", "use_sliding_window"),
    ),
    "ministral": Family(types=by_type),
    "ministral3": Family(types=all_windows, query_scaling=True),
    "qwen2": Family(bias=True, mlp_bias="mlp_bias", types=qwen_windows),
    "qwen3": Family(mlp_bias="mlp_bias", types=qwen_windows, head_norms="head"),
    "gemma": _row(
        _GEMMA, activation=("hidden_act", "gelu_pytorch_tanh"), ignored=("hidden_activation",)
    ),
    "gemma2": Family(**_GEMMA2),
    "gemma3_text": _row(_GEMMA2, head_norms="head", nested_rope=True),
    "gemma4_text": _row(
        _GEMMA2, head_norms="head", nested_rope=True, partial_rope=True, offset=0.0,
        scale=lambda config: 1.0, heads=_gemma4_heads, value_norm=True, value_is_key=True,
        layer_scale=True,
    ),
    "vaultgemma": _row(
        _GEMMA2, norms={"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    ),
    "phi3": Family(
        bias=False, out_bias=False, types=all_windows, partial_rope=True,
        ignored=("original_max_position_embeddings",),
    ),
    "olmo2": Family(norms=_POST, head_norms="whole"),
    "olmo3": Family(norms=_POST, head_norms="whole", types=by_type, nested_rope=True),
    "exaone4": Family(
        norms=_POST, head_norms="head", bias=False, out_bias=False, types=by_type,
        turned=_windowed_if_any,
    ),
    "glm": Family(out_bias=False, partial_rope=True, pairs=True),
    "glm4": Family(norms=_GLM4, out_bias=False, partial_rope=True, pairs=True),
    "cohere": Family(**_COHERE),
    "cohere2": _row(_COHERE, types=by_type, turned=_windowed),
    "granite": _row(_GRANITE, mlp_bias="mlp_bias"),
    "smollm3": Family(mlp_bias="mlp_bias", types=by_type, turned=_smollm3_turned),
    "ernie4_5": Family(pairs=True, **_USE_BIAS),
    "seed_oss": Family(out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "helium": Family(out_bias=False, mlp_bias="mlp_bias", pairs=True),
    "arcee": Family(mlp_bias="mlp_bias", gated_mlp=False, activation=("hidden_act", "relu2")),
    "qwen2_moe": Family(
        bias="qkv_bias", out_bias=False, types=qwen_windows, mlp=parts.qwen,
    ),
    "qwen3_moe": Family(
        types=all_windows, head_norms="head", mlp=parts.qwen,
        ignored=("max_window_layers", "use_sliding_window"),
    ),
    "mixtral": Family(bias=False, out_bias=False, types=all_windows, mlp=parts.mixtral),
    "olmoe": Family(head_norms="whole", mlp=parts.olmoe),
    "granitemoe": _row(_GRANITE, mlp=parts.granite),
    "granitemoeshared": _row(_GRANITE, mlp=parts.granite),
    "gpt_oss": Family(
        types=by_type, sinks=True, mlp=parts.gpt_oss, alternating=True,
        ignored=("experts_per_token", "initial_context_length"),
    ),
    "glm4_moe": Family(
        head_norms="use_qk_norm", out_bias=False, partial_rope=True, mlp=parts.deepseek,
        spare_layers=True, ignored=("num_nextn_predict_layers",),
    ),
    "dots1": Family(
        head_norms="head", types=by_type, mlp=parts.deepseek, ignored=("max_window_layers",)
    ),
    "minimax_m2": Family(
        head_norms="whole", bias=False, out_bias=False, partial_rope=True, mlp=parts.minimax,
        ignored=("rotary_dim",),
    ),
    "ernie4_5_moe": Family(pairs=True, mlp=parts.ernie, ignored=("moe_norm_min",), **_USE_BIAS),
    "qwen3_next": _row(_QWEN3_5, mlp=parts.qwen),
    "qwen3_5_text": Family(**_QWEN3_5),
    "qwen3_5_moe_text": _row(_QWEN3_5, mlp=parts.qwen),
    "lfm2": _row(_LFM2, mlp=parts.lfm2_dense),
    "lfm2_moe": _row(_LFM2, mlp=parts.lfm2_moe),
    "lfm3": _row(
        _LFM2, norms=_LFM3, bias="attention_bias", out_bias="attention_bias", gated=True,
        nested_rope=True, partial_rope=True, scales=_lfm3_scales,
    ),
    "granitemoehybrid": _row(
        _GRANITE, types=by_type, turned=_has_rope, mixer=parts.granite_mamba, mlp=parts.granite,
    ),
    "nemotron_h": Family(
        norms={"input_norm": "norm", "mlp_norm": "norm"}, single=True, types=_blocks,
        turned=lambda *layer: False, bias=False, out_bias=False, mlp_bias="mlp_bias",
        activation=("mlp_hidden_act", "relu2"), gated_mlp=False, mixer=parts.nemotron_mamba,
        mlp=parts.nemotron, eps="layer_norm_epsilon",
        ignored=(
            "attention_bias", "chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap", "mtp_layers_block_type", "num_logits_to_keep",
            "num_nextn_predict_layers", "rescale_prenorm_residual", "residual_in_fp32",
            "time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels",
        ),
    ),
}  # fmt: skip

WRAPPERS = frozenset(
    {"gemma3", "gemma4", "mistral3", "llava", "internvl", "smolvlm", "qwen3_5", "qwen3_5_moe"}
)
"""Models that take images, too, and have the settings of their text apart."""
