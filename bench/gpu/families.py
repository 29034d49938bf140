"""Checks families that differ from Llama, in FlashInfer's operations: their greedy tokens must be
plain transformers'.

A near-tie of two experts in bfloat16 can give a row another MLP. So a token counts as tied if its
gap is no larger than those of transformers' own choices in the model's dtype.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig

from radixcache.bench.gpu.equality import NEAR, Judge, compare, make_prompts
from radixcache.bench.gpu.models import free_memory, random_model
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report

_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo3": {"head_dim": 128, **_LAYERS},
    "cohere2": {"head_dim": 128, **_LAYERS},
    "glm4": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "granite": {"attention_multiplier": 0.125, "residual_multiplier": 0.5},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, **_LAYERS},
    "qwen3_moe": {"head_dim": 128, **_EXPERTS},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, **_LAYERS},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 8,
        "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "head_dim": 128,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 16, "mamba_d_head": "auto",
        "mamba_d_state": 64, "mamba_expand": 2, "mamba_chunk_size": 64, "num_local_experts": 0,
        "shared_intermediate_size": 512,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}  # fmt: skip
"""Settings besides the sizes of `equality`'s model: norms, windows, gates, experts of all kinds,
recurrent layers."""

_MARGIN = 1.5  # over the largest error of transformers' own choices


def run(place: Place, report: Report) -> None:
    for family in FAMILIES:
        report.check(f"{family} = plain transformers", check_family, place, family)


def check_family(place: Place, family: str, windows: bool = False) -> str:
    """Compare a random model of a family, perhaps with windows that are kept apart."""
    settings = {**place.sizes.small, "tie_word_embeddings": False, **FAMILIES[family]}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    config = AutoConfig.for_model(family, **settings)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = random_model(place, config)
    prompts = make_prompts(place.sizes)
    judge = Judge(copy.deepcopy(model).float(), NEAR)
    judge.near = max(NEAR, _MARGIN * judge.worst_choice(model, prompts))
    try:
        found = compare(place, model, judge, prompts, windows=windows)
        return f"{found}, up to {judge.near:.1%} counts as tied"
    finally:
        del model, judge
        free_memory()
