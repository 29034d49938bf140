"""What tiny models of the families that our loop runs have beside `helpers.models`: all that their
configs may turn on at once."""

from __future__ import annotations

from typing import Any

_WINDOWS = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
_GROUPS = {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}  # fmt: skip
_GEMMA4 = {
    **_WINDOWS, "attention_k_eq_v": True, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "final_logit_softcapping": 20.0,
}  # fmt: skip
_ROTATED = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
_SIZES = {"v_head_dim": 24, "qk_rope_head_dim": 8, "head_dim": 8, "attention_bias": True}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"attention_bias": True},
    "mistral": {"sliding_window": 11},
    "ministral": _WINDOWS,
    "ministral3": {"rope_parameters": {
        **_YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 0.5,
    }},
    "qwen2": {"max_window_layers": 1, "sliding_window": 9, "use_sliding_window": True},
    "qwen3": {"attention_bias": True, "rope_parameters": _YARN},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {**_WINDOWS, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 24, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }},
    "gemma4_text": {
        **_GEMMA4, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260,
        "enable_moe_block": True, "num_experts": 8,
        "top_k_experts": 3, "moe_intermediate_size": 48, "num_kv_shared_layers": 3,
        "num_hidden_layers": 7, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3,
                        "full_attention", "full_attention"],
    },
    "gemma4_unified_text": _GEMMA4,
    "vaultgemma": {**_WINDOWS, "query_pre_attn_scalar": 24},
    "phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "olmo2": {"attention_bias": True},
    "olmo3": {**_WINDOWS, "rope_parameters": _YARN},
    "exaone4": _WINDOWS,
    "exaone_moe": {
        **_GROUPS, **_EXPERTS, **_WINDOWS, "mlp_layer_types": ["dense", "sparse"],
        "num_shared_experts": 2, "n_routed_experts": None, "n_shared_experts": None,
    },
    "glm": {},
    "glm4": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_WINDOWS, "logit_scale": 0.25},
    "granite": _MULTIPLIERS,
    "granite_swa": {**_MULTIPLIERS, **_WINDOWS, "layer_rope_theta": [1e4, 0]},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "ernie4_5": {"use_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "helium": {"attention_bias": True, "mlp_bias": True},
    "cwm": _WINDOWS,
    "arcee": {"mlp_bias": True},
    "qwen2_moe": {
        **_EXPERTS, "shared_expert_intermediate_size": 48, "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "mixtral": {**_LOCAL, "sliding_window": 11},
    "olmoe": _EXPERTS | {"moe_intermediate_size": None},
    "granitemoe": _LOCAL | _MULTIPLIERS,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 48},
    "gpt_oss": {**_LOCAL, **_WINDOWS, "rope_parameters": {**_YARN, "truncate": False}},
    "flex_olmo": _EXPERTS | {"moe_intermediate_size": None},
    "solar_open": {**_GROUPS, "first_k_dense_replace": None, "attention_bias": True},
    "glm4_moe": {**_GROUPS, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": {
        **_GROUPS, **_SIZES, "topk_method": "group_limited_greedy", "num_experts_per_tok": 4,
        "mlp_bias": True, "rope_parameters": _ROTATED,
    },
    "deepseek_v3": {**_GROUPS, **_SIZES, "rope_parameters": _ROTATED},
    "glm4_moe_lite": {**_GROUPS, **_SIZES, "q_lora_rank": None},
    "mistral4": {
        **_GROUPS, **_SIZES, "head_dim": 24,
        "rope_parameters": {**_ROTATED, "llama_4_scaling_beta": 0.3},
    },
    "youtu": {**_SIZES, "tie_word_embeddings": True},
    "dots1": {**_GROUPS, **_WINDOWS, "norm_topk_prob": True},
    "minimax_m2": {**_LOCAL, "rotary_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48,
    },
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "lfm2": {"conv_bias": True},
    "lfm2_moe": {**_EXPERTS, "shared_expert_intermediate_size": None},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "sliding_window": 11,
    },
    "granitemoehybrid": {**_LOCAL, "position_embedding_type": "rope"},
    "bamba": {"mamba_n_groups": 4},
    "kimi_linear": {
        "q_lora_rank": 32, "v_head_dim": 24, "linear_head_dim": 20, "linear_num_heads": 3,
        "num_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "num_shared_experts": 2,
    },
    "bailing_hybrid": {"kda_lower_bound": -2.0, "v_head_dim": 24},
    "nemotron_h": {
        **_GROUPS, "num_hidden_layers": 6, "time_step_min": 0.5, "moe_latent_size": 40,
        "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba", "attention"],
    },
}  # fmt: skip
