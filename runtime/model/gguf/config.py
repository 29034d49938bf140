"""Translates the metadata of a GGUF file into the settings of a config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from radixcache.errors import ModelError
from radixcache.kernels.spec import Architecture, Unknown
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import find_gguf
from radixcache.runtime.model.families.config import Settings
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.gguf.architectures import COMMON, ROWS
from radixcache.runtime.model.gguf.ends import end_tokens
from radixcache.runtime.model.gguf.metadata import Metadata, floats

# Metadata keys (behind the architecture's name) that code here reads, besides those of its row.
_READ = frozenset({
    "attention.causal", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.value_length",
    "block_count", "expert_count", "expert_gating_func", "expert_shared_feed_forward_length",
    "classifier.output_labels", "expert_used_count", "nextn_predict_layers", "pooling_type",
    "rope.dimension_count",
    "rope.freq_base", "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier", "vocab_size",
})  # fmt: skip
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_ROPE_FACTORS = "rope_freqs.weight"
_TOWERS = ("vision.", "audio.", "mm.")  # keys of towers in the file, whose text part is read
_GEMMA3 = {
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
}  # fmt: skip
"""What Ollama's files of Gemma 3 with a tower, which is of 4B, 12B or 27B, leave out."""


def open_gguf(name_or_path: str | Path) -> GGUFFile | None:
    """Open a GGUF file by path or hub name; None if the name is not a GGUF file's.

    Raises:
        ModelError: a part cannot be read or is missing, or its architecture is not supported.
    """
    if not (paths := find_gguf(str(name_or_path))):
        return None
    path, *others = paths
    file = GGUFFile(path, others)
    if (name := file.get("general.architecture", str)) not in ROWS:
        raise ModelError(f"the GGUF file {path} has the architecture {name}, which is not read")
    if (count := max(file.get("split.count", int, 1), 1)) != len(paths):
        raise ModelError(
            f"{path} is a GGUF file in {count} parts, and by its name in {len(paths)}: "
            "name the first part as llama-gguf-split does"
        )
    return file


def settings_of(file: GGUFFile) -> dict[str, Any]:
    """Translate a file's metadata to settings of a config.json, for `families.describe`.

    Raises:
        Unknown: the metadata has an unknown key or value.
        ModelError: it lacks a required key, or has it with another type.
    """
    m, tensors = Metadata(file), file.tensors
    row = ROWS[m.name]
    known = {f"{m.name}.{key}" for key in {*_READ, *COMMON, *row.keys, *row.read}}
    towers = tuple(f"{m.name}.{key}" for key in _TOWERS)
    if any(key.startswith(towers) for key in file.metadata) and not m.has("rope.freq_base"):
        if m.name != "gemma3":
            raise Unknown(f"its metadata has towers, and no {m.name}.rope.freq_base")
        file.metadata = {f"gemma3.{key}": value for key, value in _GEMMA3.items()} | file.metadata
    for key, value in file.metadata.items():
        ours = key.startswith(f"{m.name}.") and not key.startswith(towers)
        if ours and key not in known and value not in (0, 0.0, False):
            raise Unknown(f"its metadata has {key}")
    if not m.flag("attention.causal", True):
        raise Unknown("it has attention to what comes later")
    if row.gating and m.size("expert_gating_func", 0) not in (0, row.gating):
        raise Unknown("its experts are scored in another way")
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight")
    heads, kv_heads = m.heads()
    recurrent = {0} if m.has("ssm.conv_kernel") or m.has("shortconv.l_cache") else set()
    if len({*kv_heads} - recurrent) > 1 and "attention.key_length_swa" not in row.read:
        raise Unknown("its layers have different numbers of heads")
    if "attention.kv_lora_rank" in row.keys:  # MLA's keys and values are of latents
        head_dim = m.size("rope.dimension_count")
    else:
        head_dim = m.size("attention.key_length", m.size("embedding_length") // max(heads, 1))
        if head_dim != m.size("attention.value_length", head_dim):
            raise Unknown("its values are of another size than its keys")
    if min(heads, head_dim, m.size("embedding_length")) < 1:
        raise Unknown(f"its num_attention_heads is {heads}, of {head_dim} each")
    end = file.get("tokenizer.ggml.eos_token_id", int, -1)
    found: dict[str, Any] = {
        "model_type": row.family,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "num_hidden_layers": m.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads, default=0),
        "head_dim": head_dim,
        "eos_token_id": end if end >= 0 else None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(file),
        **row.implied,
    }
    found |= {name: rows for name, part in row.sizes.items() if (rows := m.rows(part))}
    eps = "attention.layer_norm_epsilon" in row.keys
    for key, name in {**COMMON, **({} if eps else _RMS), **row.keys}.items():
        by_layer = key == "feed_forward_length" and m.is_array(key)
        if (m.has(key) and not by_layer) or name not in found:
            found[name] = m.plain(key)
    found |= {name: m.rows(part) is not None for name, part in row.flags.items()}
    found["rope_parameters"] = _rope(m, head_dim)
    if m.size("attention.sliding_window", 0):
        found["sliding_window"] = m.size("attention.sliding_window")
    if "attention.sliding_window_pattern" in row.read:
        found["layer_types"] = _windows(m, row.full_every)
    if row.adjust is not None:
        row.adjust(m, found)
    return found


def _windows(m: Metadata, every: int) -> list[str]:
    """Each layer's type: sliding or full attention; all are full if the file has no window."""
    key = "attention.sliding_window_pattern"
    if m.is_array(key):
        slides = m.file.array(f"{m.name}.{key}", bool)[: m.layers]
    else:
        every = m.size(key, every or None)
        slides = [every == 0 or (i + 1) % every != 0 for i in range(m.layers)]
    if not m.size("attention.sliding_window", 0):
        slides = [False] * m.layers
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rope(m: Metadata, head_dim: int) -> dict[str, Any]:
    """The RoPE parameters of full-attention layers, or of all layers."""
    prefix = "rope.scaling."
    kind = m.file.get(f"{m.name}.{prefix}type", str, "")
    scaled = m.file.get(f"{m.name}.{prefix}factor", float, 0.0)
    kind = kind or ("linear" if scaled else "none")
    rope: dict[str, Any] = {"rope_theta": m.number("rope.freq_base", 10_000.0)}
    if (turned := m.size("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = turned / head_dim
    if "rope_factors_long.weight" in m.file.tensors:
        kind = "longrope"
        for name in ("long", "short"):
            rope[f"{name}_factor"] = floats(m.file, f"rope_factors_{name}.weight")
    rope["rope_type"] = {"none": "default"}.get(kind, kind)
    if kind in ("linear", "yarn"):
        rope["factor"] = m.number(f"{prefix}factor")
    if kind in ("yarn", "longrope"):
        original = m.size(f"{prefix}original_context_length")
        rope["original_max_position_embeddings"] = original
    if kind != "longrope" and m.number(f"{prefix}attn_factor", 1.0) != 1.0:
        raise Unknown(f"its metadata has {m.name}.{prefix}attn_factor")
    read = {"attn_factor": "attention_factor"} if kind == "longrope" else {}
    if kind == "yarn":
        read = {f"yarn_{name}": name for name in ("beta_fast", "beta_slow")}
        read |= {
            "yarn_attn_factor": "attention_factor",
            "yarn_log_multiplier": "mscale_all_dim",
        }
    rope |= {name: m.number(prefix + key) for key, name in read.items() if m.has(prefix + key)}
    if rope.get("mscale_all_dim"):
        rope["mscale"] = 1.0
    return rope


def _dtype(file: GGUFFile) -> str:
    """The narrowest dtype that holds all matrices without loss."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")


def describe_gguf(
    file: GGUFFile, settings: Settings, max_model_len: int | None = None
) -> Architecture:
    """Describe the model of a file, given its `settings_of`; see `families.describe`.

    Raises:
        Unknown: the settings have an unknown key or value.
        ModelError: the file's RoPE frequency divisors are no vector of float32.
    """
    described = describe(settings, max_model_len, whole=True)
    proportional = file.get("general.architecture", str) == "gemma4"
    if (tensor := file.tensors.get(_ROPE_FACTORS)) is None or proportional:
        return described
    factors = torch.tensor(floats(file, _ROPE_FACTORS))  # divisors, as Llama 3 has
    if any(rope.frequencies.shape != factors.shape for rope in described.ropes):
        raise Unknown(f"its {_ROPE_FACTORS} is of shape {list(tensor.shape)}")
    ropes = tuple(replace(x, frequencies=x.frequencies / factors) for x in described.ropes)
    return replace(described, ropes=ropes)


def generation_config_of(file: GGUFFile) -> GenerationDefaults:
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
    return GenerationDefaults(
        bos_token_id=token("bos"),
        eos_token_id=end_tokens(file) or None,
        pad_token_id=token("padding"),
        **found,
    )
