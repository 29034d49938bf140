"""Each family of the table against transformers' own model of it."""

from __future__ import annotations

from typing import Any

_W = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
_TWO_ROPES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
ROWS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 11},
    "ministral": _W,
    "ministral3": {
        "sliding_window": 11,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "qwen2": {"max_window_layers": 1, "sliding_window": 9, "use_sliding_window": True},
    "qwen3": {"attention_bias": True},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24, **_W},
    "gemma3_text": {"query_pre_attn_scalar": 24, **_W, **_TWO_ROPES},
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "final_logit_softcapping": 20.0,
        **_W,
    },
    "vaultgemma": {"query_pre_attn_scalar": 24, **_W},
    "phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "olmo2": {"attention_bias": True},
    "olmo3": {
        **_W,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
        },
    },
    "exaone4": _W,
    "glm": {},
    "glm4": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_W, "logit_scale": 0.25},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "ernie4_5": {"use_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "helium": {"attention_bias": True, "mlp_bias": True},
    "arcee": {"mlp_bias": True},
    "qwen2_moe": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "sliding_window": 11},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3, "residual_multiplier": 0.7},
    "granitemoeshared": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        **_W,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            "truncate": False,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "glm4_moe": {
        **_GROUPS,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "dots1": {**_GROUPS, **_W, "norm_topk_prob": True},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 48,
        "use_bias": True,
    },
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "lfm2": {"conv_bias": True},
    "lfm2_moe": {**_EXPERTS, "shared_expert_intermediate_size": None},
    "granitemoehybrid": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba", "attention"],
        "num_hidden_layers": 6,
        **_GROUPS,
    },
}
