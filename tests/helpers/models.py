"""Tiny random models that behave like trained ones where it matters: their outputs are peaky.

transformers' default initialisation gives nearly uniform attention and logits, over which a wrong
page changes next to nothing. These weights make every head and every argmax a clear choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 260  # 256 bytes, then BOS, EOS, and two ids that no text gives
NUM_LAYERS = 2  # one that reads what another has written is enough
NUM_KV_HEADS, HEAD_DIM = 2, 16
BYTES_PER_TOKEN = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4  # of K and V in float32
BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}

# What a family's config needs beside `_BASE`. Families not listed need nothing.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 11},
    "gemma2": {
        "sliding_window": 11,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
        **_WINDOWS,
    },
    "gemma3_text": {"sliding_window": 11, "query_pre_attn_scalar": 16, **_WINDOWS},
}
# Models with recurrent layers: gated delta nets, KDA, Mamba 2 and short convolutions.
_TURNS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA = {
    **_TURNS, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {
    "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
    "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": {
        **_TURNS, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 12, "linear_value_head_dim": 24,
    },
    "kimi_linear": {
        **_TURNS, "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": None,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "linear_num_heads": 4, "linear_head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    },
    "bailing_hybrid": {
        **_TURNS, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16, "num_experts": 8,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"],
        "num_hidden_layers": 5, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "chunk_size": 8, "conv_kernel": 4,
    },
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "shared_expert_intermediate_size": None,
                 "num_dense_layers": 1},
    "lfm3": _CONV,
}  # fmt: skip

# Models with multi-head latent attention.
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
_ROUTED = {
    **_LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1,
}  # fmt: skip

# Models that take images, too, with the family of their text.
_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PARTLY = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 24}),
    "mistral3": ("mistral", {}),
    "llava": ("llama", {}),
    "internvl": ("qwen2", {}),
    "smolvlm": ("llama", {}),
    "exaone4_5": ("exaone4", {"sliding_window": 11, **_WINDOWS}),
    "gemma4_unified": ("gemma4_unified_text", {
        "sliding_window": 11, **_WINDOWS, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "pad_token_id": 0,
    }),
    "glm46v": ("glm4v_text", {"rope_parameters": _PARTLY}),
    "glm4v": ("glm4v_text", {"rope_parameters": _PARTLY}),
    "glm4v_moe": ("glm4v_moe_text", {
        "rope_parameters": _PARTLY, "attention_bias": True, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "n_shared_experts": 2, "first_k_dense_replace": 1,
    }),
    "idefics3": ("llama", {}),
    "kimi_k25": ("deepseek_v3", _ROUTED),
    "lfm2_vl": ("lfm2", _CONV),
    "lfm3_vl": ("lfm3", _CONV),
    "lighton_ocr": ("qwen3", {}),
    "llava_next": ("mistral", {"sliding_window": 11}),
    "llava_onevision": ("qwen2", {}),
    "minicpmv4_6": ("qwen3_5_text", _DELTA),
    "qwen2_vl": ("qwen2_vl_text", {"rope_parameters": _MROPE}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {
        "rope_parameters": _MROPE, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"rope_parameters": _MROPE}),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": _MROPE}),
}  # fmt: skip

MLA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"), _ROUTED),
    "minicpm3": _LATENT, "mistral4": {**_ROUTED, "head_dim": 32}, "youtu": _LATENT,
}  # fmt: skip

# How much larger than variance-keeping the weights are, by parts of their names.
_GAINS = {"q_proj": 2.5, "k_proj": 2.5, "query": 2.5, "qkv": 2.5, "lm_head": 4.0}


def tiny_model(
    family: str, folder: Path, seed: int = 0, *, tokenizer: bool = True, **options: Any
) -> Path:
    """Save a loadable model of a family, by transformers' `model_type`, and return its folder.

    The tokenizer is byte-level: one token for each byte of the text, and a small chat template.
    `options` override the config.
    """
    torch.manual_seed(seed)
    settings = deepcopy({**_BASE, **(FAMILIES | HYBRIDS | MLA).get(family, {}), **options})
    if family in MULTIMODAL:
        text, more = MULTIMODAL[family]
        text_config = {"model_type": text, **settings, **more}
        settings = {"text_config": text_config, "vision_config": _VISION, "eos_token_id": EOS}
        settings["tie_word_embeddings"] = False
    model = auto_class(family).from_config(AutoConfig.for_model(family, **settings))
    make_peaky(model)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    if family == "kimi_k25":  # as on the hub; transformers names layers as it does the images'
        stored = load_file(Path(folder) / "model.safetensors")
        named = {name.replace("model.blocks", "model.layers"): x for name, x in stored.items()}
        save_file(named, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return Path(folder)


def auto_class(family: str) -> Any:
    """transformers' class for models of this type; it has Mistral 4 with those of images alone."""
    images = family in MULTIMODAL or family == "mistral4"
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


@torch.no_grad()
def make_peaky(model: PreTrainedModel) -> None:
    """Draw all weights anew so that attention and logits are far from uniform."""
    for name, weight in model.named_parameters():
        if weight.ndim < 2:  # norms and biases
            weight.add_(torch.randn_like(weight) * 0.1 + (1.5 if "q_norm" in name else 0.0))
        elif "embed" in name:
            weight.normal_(0.0, 1.0)
        else:
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
            weight.normal_(0.0, gain * max(weight.shape[-1], 1) ** -0.5)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():  # biases that choose experts, scales of layers
        if name in saved and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer) * 0.1)


def byte_tokenizer(
    template: str = CHAT_TEMPLATE, specials: Sequence[str] = (), **more: Any
) -> PreTrainedTokenizerFast:
    """A token for each byte, then `<s>`, `</s>` and `specials`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *specials])
    more |= {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **more)
    assert (fast.bos_token_id, fast.eos_token_id) == (BOS, EOS)
    return fast
