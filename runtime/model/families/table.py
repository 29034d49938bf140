"""The table of families: a row says how a family differs from Llama."""

from __future__ import annotations

from typing import Any

from radixcache.runtime.model.description import Unknown
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


def _windowed(config: Config, number: int, kind: str) -> bool:
    return kind == "sliding_attention"


def _windowed_if_any(config: Config, number: int, kind: str) -> bool:
    return kind == "sliding_attention" or config.maybe("sliding_window") is None


def _smollm3_turned(config: Config, number: int, kind: str) -> bool:
    config.ignore("no_rope_layer_interval", "use_sliding_window", "max_window_layers")
    return bool(config.get("no_rope_layers")[number])


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
}  # fmt: skip

WRAPPERS = frozenset({"gemma3", "gemma4", "mistral3", "llava", "internvl", "smolvlm"})
"""Models that take images, too, and have the settings of their text apart."""
