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
}
