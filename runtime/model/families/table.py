"""The table of families: a row says how a family differs from Llama."""

from __future__ import annotations

from typing import Any

from radixcache.kernels.spec import Unknown
from radixcache.runtime.model.families import gemma4, parts
from radixcache.runtime.model.families.config import Config
from radixcache.runtime.model.families.family import Family, all_windows, by_type, qwen_windows

_PRE = {"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_POST = {"attended_norm": "post_attention_layernorm", "after_norm": "post_feedforward_layernorm"}
_GLM4 = {
    "input_norm": "input_layernorm", "attended_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm", "after_norm": "post_mlp_layernorm",
}  # fmt: skip
_LFM2 = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}
_LFM3 = {**_LFM2, "attended_norm": "post_operator_norm", "after_norm": "post_ffn_norm"}


def _gemma_scales(config: Config) -> dict[str, Any]:
    if config.maybe("use_bidirectional_attention") not in (None, False, "vision"):
        raise Unknown("its attention looks at what comes later")
    return {"embed_scale": config.size("hidden_size") ** 0.5}


def _gemma2_scales(config: Config) -> dict[str, Any]:
    return {**_gemma_scales(config), "logit_softcap": config.softcap("final_logit_softcapping")}


def _granite_scales(config: Config) -> dict[str, Any]:
    embed_scale, logits = config.number("embedding_multiplier"), config.number("logits_scaling")
    return {"embed_scale": embed_scale, "logit_scale": 1.0 / logits}


def _granite_swa_turned(config: Config, number: int, kind: str) -> bool:
    bases, rope = config.get("layer_rope_theta"), config.maybe("rope_parameters") or {}
    if {*bases} - {0, rope.get("rope_theta")}:
        raise Unknown("its layers turn by different bases")
    return bool(bases[number])


def _lfm3_scales(config: Config) -> dict[str, Any]:
    if not (config.flag("use_sandwich_norm") and config.flag("use_attention_gate")):
        raise Unknown("its layers have no norms after their blocks, or no gates")
    return {}


def _bamba_types(config: Config) -> list[str]:
    attends, count = config.maybe("attn_layer_indices") or [], config.size("num_hidden_layers")
    return ["full_attention" if n in attends else "linear_attention" for n in range(count)]


def _untied(config: Config) -> None:
    if config.flag("tie_word_embeddings"):  # transformers keeps a head of its own all the same
        raise Unknown("its head cannot be its embedding")


def _nemotron_types(config: Config) -> list[str]:
    _untied(config)
    types: list[str] = config.get("layers_block_type")
    return types


def _kda_types(config: Config) -> list[str]:
    _untied(config)
    return by_type(config)


def _row(*bases: dict[str, Any], **more: Any) -> Family:
    settings: dict[str, Any] = {}
    for base in bases:
        settings |= base
    return Family(**settings | more)


_NO_BIAS: dict[str, Any] = {"bias": False, "out_bias": False}
_USE_BIAS: dict[str, Any] = dict.fromkeys(("bias", "out_bias", "mlp_bias"), "use_bias")
_MLP_BIAS: dict[str, Any] = {"mlp_bias": "mlp_bias"}
_GEMMA: dict[str, Any] = {
    "offset": 1.0, "scales": _gemma_scales, "activation": ("hidden_act", "gelu_pytorch_tanh"),
    "ignored": "hidden_activation",
}  # fmt: skip
_GEMMA2: dict[str, Any] = {
    **_GEMMA, "norms": _PRE | _POST, "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "types": by_type, "scales": _gemma2_scales, "ignored": "hidden_act",
    "scale": lambda config: config.size("query_pre_attn_scalar") ** -0.5,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    **_GEMMA2, "norms": _PRE | _POST | gemma4.BESIDE | gemma4.PER_LAYER, "head_norms": "head",
    "nested_rope": True, "partial_rope": True, "offset": 0.0, "adjust": gemma4.adjust,
    "scale": lambda config: 1.0, "heads": gemma4.heads, "value_norm": True,
    "value_is_key": "attention_k_eq_v", "layer_scale": True,
    "both_ways": lambda config, kind: (
        kind == "sliding_attention" and config.maybe("use_bidirectional_attention") == "vision"
    ),
    "ignored": "hidden_act moe_intermediate_size num_experts top_k_experts "
    "vocab_size_per_layer_input",
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "scale": lambda config: config.number("attention_multiplier"), "scales": _granite_scales,
    "residual_scale": "residual_multiplier", "ignored": "init_method normalization_function",
}  # fmt: skip
_COHERE: dict[str, Any] = {
    "norms": {"input_norm": "input_layernorm"}, "parallel": True, "centred": True,
    "eps": "layer_norm_eps", "pairs": True,
    "scales": lambda config: {"logit_scale": config.number("logit_scale")},
    "ignored": "layer_switch model_max_length order_of_interleaved_layers position_embedding_type "
    "rotary_pct use_embedding_sharing use_gated_activation use_parallel_block "
    "use_parallel_embedding",
}  # fmt: skip
_EXAONE: dict[str, Any] = {
    **_NO_BIAS, "head_norms": "head", "types": by_type,
    "turned": lambda config, number, kind: (
        kind == "sliding_attention" or config.maybe("sliding_window") is None
    ),
}  # fmt: skip
_GLM: dict[str, Any] = {"out_bias": False, "partial_rope": True}
_QWEN3_5: dict[str, Any] = {
    "offset": 1.0, "head_norms": "head", "gated": True, "types": by_type, "partial_rope": True,
    "mixer": parts.delta_net,
    "ignored": "attn_output_gate full_attention_interval mamba_ssm_dtype mlp_only_layers "
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    "agreed": {"output_gate_type": ("silu", "swish")},
}  # fmt: skip
_LFM: dict[str, Any] = {
    "norms": _LFM2, "head_norms": "head", "activation": (None, "silu"), "eps": "norm_eps",
    "types": by_type, "mixer": parts.short_conv, **_NO_BIAS,
    "ignored": "block_dim block_ff_dim block_mlp_init_scale block_norm_eps block_out_init_scale "
    "block_use_swiglu block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init "
    "full_attn_idxs num_heads theta use_pos_enc",
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "latent": True, "pairs": True, "spare_layers": True,
    "ignored": "aux_loss_alpha ep_size num_mtp_layers num_nextn_predict_layers seq_aux",
}  # fmt: skip
_DEEPSEEK_3: dict[str, Any] = {
    **_LATENT, "mlp": parts.deepseek,
    "agreed": {
        "moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
        "partial_rotary_factor": (1,),
    },
}  # fmt: skip
_KDA: dict[str, Any] = {
    **_LATENT, "types": _kda_types, "mlp": parts.deepseek,
    "renamed": {
        "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
    },
}  # fmt: skip
_HEAD_NORMS: dict[str, Any] = {"head_norms": "head", "agreed": {"use_qk_norm": (True,)}}
_QWEN_UNUSED = "max_window_layers use_sliding_window"

FAMILIES: dict[str, Family] = {
    "llama": _row(_MLP_BIAS),
    "iquestcoder": _row(_MLP_BIAS),
    "mistral": _row(_MLP_BIAS, types=all_windows, ignored=_QWEN_UNUSED),
    "ministral": Family(types=by_type),
    "ministral3": Family(types=all_windows, query_scaling=True),
    "qwen2": _row(_MLP_BIAS, bias=True, types=qwen_windows),
    "qwen3": _row(_MLP_BIAS, _HEAD_NORMS, types=qwen_windows),
    "gemma": _row(_GEMMA),
    "gemma2": _row(_GEMMA2, softcaps=True),
    "gemma3_text": _row(
        _GEMMA2, head_norms="head", nested_rope=True, both_ways=lambda config, kind: True
    ),
    "gemma4_text": _row(_GEMMA4),
    "gemma4_unified_text": _row(_GEMMA4),
    "vaultgemma": _row(_GEMMA2, norms=_PRE, softcaps=True),
    "phi3": _row(
        _NO_BIAS, types=all_windows, partial_rope=True,
        ignored="full_attn_mod interpolate_factor original_max_position_embeddings",
    ),
    "olmo2": Family(norms=_POST, head_norms="whole"),
    "olmo3": Family(norms=_POST, head_norms="whole", types=by_type, nested_rope=True),
    "exaone4": _row(_EXAONE, norms=_POST),
    "exaone_moe": _row(_EXAONE, mlp=parts.deepseek),
    "glm": _row(_GLM, pairs=True),
    "glm4": _row(_GLM, pairs=True, norms=_GLM4),
    "glm4v_text": _row(_GLM, pairs=True, norms=_GLM4, bias=True, axes="blocks"),
    "cohere": _row(_COHERE),
    "cohere2": _row(
        _COHERE, types=by_type, turned=lambda config, number, kind: kind == "sliding_attention"
    ),
    "granite": _row(_GRANITE, _MLP_BIAS),
    "granite_swa": _row(
        _GRANITE, _MLP_BIAS, types=by_type, sinks=True, turned=_granite_swa_turned
    ),
    "qwen2_vl_text": Family(bias=True, out_bias=False, types=qwen_windows, axes="blocks"),
    "qwen2_5_vl_text": Family(bias=True, out_bias=False, types=qwen_windows, axes="blocks"),
    "qwen3_vl_text": Family(head_norms="head", axes="interleaved"),
    "smollm3": _row(
        _MLP_BIAS, types=by_type, ignored=f"{_QWEN_UNUSED} no_rope_layer_interval",
        turned=lambda config, number, kind: bool(config.get("no_rope_layers")[number]),
    ),
    "ernie4_5": _row(_USE_BIAS, pairs=True),
    "seed_oss": _row(_MLP_BIAS, out_bias="attention_out_bias"),
    "helium": _row(_MLP_BIAS, out_bias=False, pairs=True),
    "cwm": _row(_NO_BIAS, _MLP_BIAS, types=by_type),
    "arcee": _row(_MLP_BIAS, gated_mlp=False, activation=("hidden_act", "relu2")),
    "qwen2_moe": Family(bias="qkv_bias", out_bias=False, types=qwen_windows, mlp=parts.qwen),
    "qwen3_moe": _row(_HEAD_NORMS, types=all_windows, mlp=parts.qwen, ignored=_QWEN_UNUSED),
    "qwen3_vl_moe_text": Family(
        head_norms="head", mlp=parts.qwen, agreed={"norm_topk_prob": (True,)}, axes="interleaved"
    ),
    "mixtral": _row(_NO_BIAS, types=all_windows, mlp=parts.mixtral),
    "olmoe": Family(head_norms="whole", mlp=parts.olmoe),
    "granitemoe": _row(_GRANITE, mlp=parts.granite),
    "granitemoeshared": _row(_GRANITE, mlp=parts.granite),
    "gpt_oss": Family(
        types=by_type, sinks=True, mlp=parts.gpt_oss, alternating=True,
        ignored="experts_per_token initial_context_length",
    ),
    "flex_olmo": Family(norms=_POST, head_norms="whole", mlp=parts.olmoe),
    "solar_open": Family(out_bias=False, mlp=parts.deepseek),
    "glm4_moe": _row(
        _GLM, head_norms="use_qk_norm", mlp=parts.deepseek, spare_layers=True,
        ignored="num_nextn_predict_layers",
    ),
    "deepseek_v2": _row(
        _LATENT, _MLP_BIAS, mlp=parts.deepseek_v2,
        agreed={
            "moe_layer_freq": (1,), "scoring_func": ("softmax",), "norm_topk_prob": (False,),
        },
    ),
    "deepseek_v3": _row(_DEEPSEEK_3),
    "glm4_moe_lite": _row(_DEEPSEEK_3),
    "mistral4": _row(_LATENT, query_scaling=True, partial_rope=True, mlp=parts.mistral4),
    "kimi_linear": _row(
        _KDA, mixer=parts.kimi_delta, turned=lambda *layer: False,
        agreed={
            "mla_use_nope": (True,), "moe_layer_freq": (1,), "use_grouped_topk": (True,),
            "moe_router_activation_func": ("sigmoid",), "topk_method": ("noaux_tc",),
        },
    ),
    "bailing_hybrid": _row(
        _KDA, mixer=parts.ling_delta, gated=True,
        ignored=f"{_LATENT['ignored']} layer_group_size mtp_loss_scaling_factor "
        "short_conv_kernel_size",
    ),
    "youtu": _row(_LATENT, ignored="embedding_initializer_range"),
    "glm4v_moe_text": _row(
        _GLM, mlp=parts.deepseek, spare_layers=True, ignored="num_nextn_predict_layers",
        axes="blocks",
    ),
    "dots1": Family(
        head_norms="head", types=by_type, mlp=parts.deepseek,
        ignored="max_window_layers moe_layer_freq scoring_func topk_method",
    ),
    "minimax_m2": _row(
        _NO_BIAS, head_norms="whole", partial_rope=True, mlp=parts.minimax,
        ignored="attn_type_list mtp_transformer_layers num_mtp_modules qk_norm_type rotary_dim "
        "scoring_func shared_intermediate_size shared_moe_mode use_mtp use_qk_norm "
        "use_routing_bias layernorm_full_attention_beta layernorm_linear_attention_beta "
        "layernorm_mlp_beta mlp_intermediate_size",
    ),
    "ernie4_5_moe": _row(
        _USE_BIAS, pairs=True, mlp=parts.ernie,
        ignored="moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers",
        agreed={"moe_norm_min": (1e-12,)},
    ),
    "qwen3_next": _row(_QWEN3_5, mlp=parts.qwen),
    "qwen3_5_text": _row(_QWEN3_5, axes="interleaved"),
    "qwen3_5_moe_text": _row(_QWEN3_5, axes="interleaved", mlp=parts.qwen),
    "lfm2": _row(_LFM, mlp=parts.lfm2_dense),
    "lfm2_moe": _row(_LFM, mlp=parts.lfm2_moe),
    "lfm3": _row(
        _LFM, norms=_LFM3, bias="attention_bias", out_bias="attention_bias", gated=True,
        nested_rope=True, partial_rope=True, scales=_lfm3_scales,
    ),
    "granitemoehybrid": _row(
        _GRANITE, types=by_type, mixer=parts.granite_mamba, mlp=parts.granite,
        turned=lambda config, number, kind: config.get("position_embedding_type") == "rope",
        ignored=f"{_GRANITE['ignored']} mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head "
        "mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias time_step_limit",
    ),
    "bamba": _row(
        _MLP_BIAS, norms={"input_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
        types=_bamba_types, mixer=parts.granite_mamba, partial_rope=True,
        ignored="mamba_chunk_size mamba_expand num_logits_to_keep z_loss_coefficient",
    ),
    "nemotron_h": _row(
        _NO_BIAS, _MLP_BIAS, norms={"input_norm": "norm", "mlp_norm": "norm"}, single=True,
        types=_nemotron_types, turned=lambda *layer: False, eps="layer_norm_epsilon",
        activation=("mlp_hidden_act", "relu2"), gated_mlp=False, mixer=parts.nemotron_mamba,
        mlp=parts.nemotron,
        ignored="attention_bias chunk_size expand intermediate_size mamba_proj_bias "
        "mamba_ssm_cache_dtype moe_intermediate_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_overlap mtp_layers_block_type n_group n_routed_experts "
        "n_shared_experts norm_eps norm_topk_prob num_experts_per_tok num_hidden_layers "
        "num_logits_to_keep num_nextn_predict_layers partial_rotary_factor "
        "rescale_prenorm_residual residual_in_fp32 rms_norm_eps routed_scaling_factor "
        "time_step_floor time_step_limit time_step_max time_step_rank topk_group "
        "use_mamba_kernels",
    ),
}  # fmt: skip

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families by other names that configs have for them."""

WRAPPERS = frozenset(
    """
    exaone4_5 gemma3 gemma4 gemma4_unified glm46v glm4v glm4v_moe idefics3 internvl kimi_k25 lfm2_vl
    lfm3_vl lighton_ocr llava llava_next llava_onevision minicpmv4_6 mistral3 qwen2_5_vl qwen2_vl
    qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
""".split()
)
"""Models that take images, too, and have the settings of their text apart."""
