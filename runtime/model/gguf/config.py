"""Translates the metadata of a GGUF file into the settings of a config.json."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig

from radixcache.errors import ModelError
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.model.architecture import Architecture, Unknown
from radixcache.runtime.model.gguf.ends import end_tokens

FAMILIES = ("llama", "qwen2", "qwen3")
"""Architectures whose metadata is all understood or refused; Mistral's is `llama`."""

_ROPE_FACTORS = "rope_freqs.weight"

# Keys after the name of the architecture that `settings_of` reads.
_READ = frozenset({
    "attention.causal", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.value_length",
    "block_count", "context_length", "embedding_length", "expert_count", "expert_used_count",
    "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size",
})  # fmt: skip


def settings_of(file: GGUFFile) -> dict[str, Any]:
    """The settings of config.json for `architecture.understand`.

    Raises:
        Unknown: the metadata has what this does not understand.
        ModelError: it lacks what it must have, or has it as another type.
    """
    family = file.get("general.architecture", str)
    known = {f"{family}.{key}" for key in _READ}
    for key, value in file.metadata.items():
        if key.startswith(f"{family}.") and key not in known and value not in (0, 0.0, False):
            raise Unknown(f"its metadata has {key}")

    def size(key: str, default: int | None = None) -> int:
        return file.get(f"{family}.{key}", int, default)

    if size("expert_count", 0) or not file.get(f"{family}.attention.causal", bool, True):
        raise Unknown("it has experts, or attention to what comes later")
    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden // max(heads, 1))
    if (
        not head_dim
        == size("attention.value_length", head_dim)
        == size("rope.dimension_count", head_dim)
    ):
        raise Unknown("its heads are of more than one size, or turned in part")
    names, window = file.tensors, size("attention.sliding_window", 0)
    if window and family != "llama":
        raise Unknown(f"its metadata has {family}.attention.sliding_window")
    return {
        "model_type": "mistral" if window else family,
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": file.get(f"{family}.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(file, family),
        "sliding_window": window or None,
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": _dtype(file),
    }


def _rows(file: GGUFFile, name: str) -> int:
    if (tensor := file.tensors.get(name)) is None:
        raise ModelError(f"the GGUF file has no tensor {name}")
    return tensor.shape[0]


def _dtype(file: GGUFFile) -> str:
    """The narrowest dtype that holds all matrices without loss."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")


def _rope(file: GGUFFile, family: str) -> dict[str, Any]:
    prefix = f"{family}.rope.scaling."
    kind = file.get(f"{prefix}type", str, "none")
    kind = "default" if kind == "none" else kind
    rope = {"rope_type": kind, "rope_theta": file.get(f"{family}.rope.freq_base", float, 10_000.0)}
    if kind != "default":
        rope["factor"] = file.get(f"{prefix}factor", float)
    if kind == "yarn":
        trained = f"{prefix}original_context_length"
        rope["original_max_position_embeddings"] = file.get(trained, int)
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}yarn_{name}" in file.metadata:
                rope[name] = file.get(f"{prefix}yarn_{name}", float)
    return rope


def with_rope_factors(architecture: Architecture, file: GGUFFile) -> Architecture:
    """The architecture with its frequencies divided by the file's factors, as Llama 3 has."""
    if (tensor := file.tensors.get(_ROPE_FACTORS)) is None:
        return architecture
    frequencies = architecture.inverse_frequencies
    if tensor.kind.name != "F32" or tensor.shape != frequencies.shape:
        raise Unknown(f"its {_ROPE_FACTORS} is {tensor.kind.name} {list(tensor.shape)}")
    factors = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32)
    return architecture._replace(inverse_frequencies=frequencies / factors)


def generation_config_of(file: GGUFFile) -> GenerationConfig:
    """The tokens that begin and end texts and turns, and the default sampling."""

    def token(key: str) -> int | None:
        at = file.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        return at if at >= 0 else None

    sampling = {"temp": ("temperature", float), "top_k": ("top_k", int)}
    sampling |= {"top_p": ("top_p", float), "min_p": ("min_p", float)}
    found = {
        name: file.get(f"general.sampling.{key}", kind)
        for key, (name, kind) in sampling.items()
        if f"general.sampling.{key}" in file.metadata
    }
    return GenerationConfig(
        bos_token_id=token("bos"),
        eos_token_id=end_tokens(file) or None,
        pad_token_id=token("padding"),
        **found,
    )
