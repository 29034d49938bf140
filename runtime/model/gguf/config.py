"""Translates the metadata of a GGUF file into the settings of a config.json."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig

from radixcache.errors import ModelError
from radixcache.runtime.checkpoints.gguf_file import Array, GGUFFile
from radixcache.runtime.checkpoints.model_files import find_gguf
from radixcache.runtime.model.description import Architecture, Unknown
from radixcache.runtime.model.families.config import Settings
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.gguf.architectures import COMMON, ROWS, Row
from radixcache.runtime.model.gguf.ends import end_tokens

# Keys after the name of the architecture that are read in code, beside those of its row.
_READ = frozenset({
    "attention.causal", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.value_length",
    "block_count", "expert_count", "expert_gating_func", "expert_shared_feed_forward_length",
    "expert_used_count", "nextn_predict_layers", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier", "vocab_size",
})  # fmt: skip
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_ROPE_FACTORS = "rope_freqs.weight"
_NOT_TURNED = torch.tensor(1e30).item()
"""A frequency's divisor that stands for no rotation."""


def open_gguf(name_or_path: str | Path) -> GGUFFile | None:
    """The GGUF file of that name; None for another kind of model.

    Raises:
        ModelError: the file cannot be read, or is of an architecture that is not.
    """
    if (path := find_gguf(str(name_or_path))) is None:
        return None
    file = GGUFFile(path)
    if (name := file.get("general.architecture", str)) not in ROWS:
        raise ModelError(f"the GGUF file {path} has the architecture {name}, which is not read")
    if (count := file.get("split.count", int, 1)) > 1:
        raise ModelError(
            f"{path} is one of {count} parts of a GGUF file: llama-gguf-split --merge joins them"
        )
    return file


def settings_of(file: GGUFFile) -> dict[str, Any]:
    """The settings of config.json for `families.describe`.

    Raises:
        Unknown: the metadata has what this does not understand.
        ModelError: it lacks what it must have, or has it as another type.
    """
    return _Metadata(file).settings()


class _Metadata:
    """The metadata of one architecture, by the keys behind its name."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._name = file.get("general.architecture", str)
        self._row: Row = ROWS[self._name]
        keys = {*_READ, *COMMON, *self._row.keys, *self._row.read}
        known = {f"{self._name}.{key}" for key in keys}
        for key, value in file.metadata.items():
            ours = key.startswith(f"{self._name}.")
            if ours and key not in known and value not in (0, 0.0, False):
                raise Unknown(f"its metadata has {key}")
        self._layers = self.size("block_count") - self.size("nextn_predict_layers", 0)
        if not 0 < self._layers <= len(file.tensors):
            raise Unknown(f"its metadata has {self._layers} layers")

    def size(self, key: str, default: int | None = None) -> int:
        return self._file.get(f"{self._name}.{key}", int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the file as the decimal number that it was, such as 0.1."""
        return _decimal(self._file.get(f"{self._name}.{key}", float, default))

    def plain(self, key: str) -> int | float | bool:
        value = self._file.metadata.get(f"{self._name}.{key}")
        if type(value) is float:
            return _decimal(value)
        kind = bool if type(value) is bool else int
        return self._file.get(f"{self._name}.{key}", kind)

    def has(self, key: str) -> bool:
        return f"{self._name}.{key}" in self._file.metadata

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """A size of each layer, of which the file may have one for all."""
        name = f"{self._name}.{key}"
        if not isinstance(self._file.metadata.get(name), Array):
            return [self.size(key, default)] * self._layers
        found = self._file.array(name, int)[: self._layers]
        if len(found) < self._layers:
            raise Unknown(f"its {name} is for {len(found)} layers")
        return found

    def rows(self, part: str) -> int | None:
        """The rows of the first tensor of that name in a layer."""
        pattern = rf"blk\.\d+\.{re.escape(part)}"
        shapes = (x.shape for n, x in self._file.tensors.items() if re.fullmatch(pattern, n))
        shape = next(shapes, None)
        return None if shape is None else shape[max(len(shape) - 2, 0)]

    def settings(self) -> dict[str, Any]:
        row, tensors = self._row, self._file.tensors
        if not self._file.get(f"{self._name}.attention.causal", bool, True):
            raise Unknown("it has attention to what comes later")
        if self.size("expert_gating_func", 0) not in (0, row.gating):
            raise Unknown("its experts are scored in another way")
        if "token_embd.weight" not in tensors:
            raise ModelError("the GGUF file has no tensor token_embd.weight")
        heads = max(self.per_layer("attention.head_count"), default=0)
        kv_heads = self.per_layer("attention.head_count_kv", heads)
        recurrent = {0} if self.has("ssm.conv_kernel") or self.has("shortconv.l_cache") else set()
        if len({*kv_heads} - recurrent) > 1 and row.family != "gemma4_text":
            raise Unknown("its layers have different numbers of heads")
        head_dim = self.size("attention.key_length", self.size("embedding_length") // max(heads, 1))
        if head_dim != self.size("attention.value_length", head_dim):
            raise Unknown("its values are of another size than its keys")
        if min(heads, head_dim, self.size("embedding_length")) < 1:
            raise Unknown(f"its num_attention_heads is {heads}, of {head_dim} each")
        end = self._file.get("tokenizer.ggml.eos_token_id", int, -1)
        found: dict[str, Any] = {
            "model_type": row.family,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "num_hidden_layers": self._layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(kv_heads, default=0),
            "head_dim": head_dim,
            "eos_token_id": end if end >= 0 else None,
            "tie_word_embeddings": "output.weight" not in tensors,
            "dtype": _dtype(self._file),
            **row.implied,
        }
        found |= {name: rows for name, part in row.sizes.items() if (rows := self.rows(part))}
        eps = "attention.layer_norm_epsilon" in row.keys
        for key, name in {**COMMON, **({} if eps else _RMS), **row.keys}.items():
            if (self.has(key) and not self.is_array(key)) or name not in found:
                found[name] = self.plain(key)
        found |= {name: self.rows(part) is not None for name, part in row.flags.items()}
        found["rope_parameters"] = self.rope(head_dim)
        if self.size("attention.sliding_window", 0):
            found["sliding_window"] = self.size("attention.sliding_window")
        if "attention.sliding_window_pattern" in row.read:
            found["layer_types"] = self.windows()
        self.adjust(found, kv_heads)
        return found

    def adjust(self, found: dict[str, Any], kv_heads: list[int]) -> None:
        """What a family's config says in a way of its own."""
        rope, family = found["rope_parameters"], found["model_type"]
        hidden, head_dim = found["hidden_size"], found["head_dim"]
        turned = self._file.get(f"{self._name}.rope.scaling.finetuned", bool, True)
        if family == "llama" and self.size("expert_count", 0):
            found |= {"model_type": "mixtral", "num_local_experts": self.size("expert_count")}
            found |= {"num_experts_per_tok": self.size("expert_used_count")}
        elif family == "llama" and "sliding_window" in found:
            found["model_type"] = "mistral"
        elif family == "ministral3" and self.has("attention.temperature_scale"):
            rope["llama_4_scaling_beta"] = self.number("attention.temperature_scale")
        elif family == "ministral3":
            found["model_type"] = "mistral"
        elif family in ("gemma2", "gemma3_text"):  # llama.cpp knows the 27B by their layers
            large = self._layers == {"gemma2": 46, "gemma3_text": 62}[family]
            heads = found["num_attention_heads"]
            found["query_pre_attn_scalar"] = hidden // heads if large else head_dim
        elif family == "gemma4_text":
            self._gemma4(found, kv_heads)
        elif family == "olmo2" and "sliding_window" in found:
            found["model_type"] = "olmo3"
        elif family == "olmo2":
            del found["layer_types"]
        elif family == "phi3" and rope["rope_type"] == "longrope":
            found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        elif family == "gpt_oss" and rope["rope_type"] == "yarn":
            rope["truncate"] = False
        elif family in ("granite", "granitemoe") and not turned:
            raise Unknown("its layers have no RoPE")
        elif family == "smollm3":
            found["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(self._layers)]
        elif family == "granitemoe" and (shared := self.rows("ffn_up_shexp.weight")):
            found |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
        elif family == "ernie4_5_moe":
            found["moe_layer_end_index"] = self._layers - 1
        elif family.startswith("lfm2"):
            found["norm_eps"] = found.pop("rms_norm_eps")
            found["layer_types"] = ["full_attention" if n else "conv" for n in kv_heads]
        elif family == "granitemoehybrid":
            shared = self.rows("ffn_up_shexp.weight") or self.rows("ffn_up.weight")
            found |= {"shared_intermediate_size": shared, "mamba_d_head": self._inner()}
            found["mamba_expand"] = self.size("ssm.inner_size") // hidden
            found["position_embedding_type"] = "rope" if turned else "nope"
            found["layer_types"] = ["attention" if n else "mamba" for n in kv_heads]
        elif family == "nemotron_h":
            sizes = self.per_layer("feed_forward_length")
            mlp = "moe" if self.size("expert_count", 0) else "mlp"
            found |= {"intermediate_size": max(sizes, default=0), "mamba_head_dim": self._inner()}
            found["layer_norm_epsilon"] = found.pop("rms_norm_eps")
            found.pop("first_k_dense_replace", None)
            found["layers_block_type"] = [
                "attention" if heads else mlp if size else "mamba"
                for heads, size in zip(kv_heads, sizes, strict=True)
            ]
        elif "linear_num_value_heads" in found:
            found["linear_value_head_dim"] = self._inner()
            key, every = "attention.recurrent_layers", self.size("full_attention_interval", 4)
            delta = [(i + 1) % every != 0 for i in range(self._layers)]
            if self.is_array(key):
                delta = self._file.array(f"{self._name}.{key}", bool)[: self._layers]
            found["layer_types"] = ["linear_attention" if x else "full_attention" for x in delta]
        if found["model_type"] in ("gemma3_text", "gemma4_text", "olmo3"):
            local = 10_000.0 if family.startswith("gemma") else rope["rope_theta"]
            near = {"rope_type": "default", "rope_theta": self.number("rope.freq_base_swa", local)}
            found["rope_parameters"] = {"sliding_attention": near, "full_attention": rope}

    def _inner(self) -> int:
        """The size of a recurrent layer's values."""
        return self.size("ssm.inner_size") // max(self.size("ssm.time_step_rank"), 1)

    def _gemma4(self, found: dict[str, Any], kv_heads: list[int]) -> None:
        """Layers without a window have heads of their own, and turn the first pairs of a head."""
        wide, slides = found["head_dim"], [t == "sliding_attention" for t in found["layer_types"]]
        divisors = _floats(self._file, "rope_freqs.weight")
        turned = divisors.count(1.0)
        if divisors != [1.0] * turned + [_NOT_TURNED] * (wide // 2 - turned):
            raise Unknown("its RoPE turns other parts of a head")
        found["head_dim"] = self.size("attention.key_length_swa")
        found["num_key_value_heads"] = kv_heads[slides.index(True) if True in slides else 0]
        found["per_layer_config"] = {
            str(i): {"head_dim": wide, "num_key_value_heads": kv_heads[i]}
            for i, slide in enumerate(slides)
            if not slide
        }
        rope = found["rope_parameters"]
        rope |= {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / wide}

    def is_array(self, key: str) -> bool:
        return isinstance(self._file.metadata.get(f"{self._name}.{key}"), Array)

    def windows(self) -> list[str]:
        """The type of each layer; without a window, all attend to everything."""
        key, every = "attention.sliding_window_pattern", self._row.full_every
        if self.is_array(key):
            slides = self._file.array(f"{self._name}.{key}", bool)[: self._layers]
        else:
            every = self.size(key, every or None)
            slides = [every == 0 or (i + 1) % every != 0 for i in range(self._layers)]
        if not self.size("attention.sliding_window", 0):
            slides = [False] * self._layers
        return ["sliding_attention" if slide else "full_attention" for slide in slides]

    def rope(self, head_dim: int) -> dict[str, Any]:
        """RoPE's parameters of the layers without a window, or of all."""
        prefix = "rope.scaling."
        kind = self._file.get(f"{self._name}.{prefix}type", str, "")
        scaled = self._file.get(f"{self._name}.{prefix}factor", float, 0.0)
        kind = kind or ("linear" if scaled else "none")
        rope: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10_000.0)}
        if (turned := self.size("rope.dimension_count", head_dim)) != head_dim:
            rope["partial_rotary_factor"] = turned / head_dim
        if "rope_factors_long.weight" in self._file.tensors:
            kind = "longrope"
            for name in ("long", "short"):
                rope[f"{name}_factor"] = _floats(self._file, f"rope_factors_{name}.weight")
        rope["rope_type"] = {"none": "default"}.get(kind, kind)
        if kind in ("linear", "yarn"):
            rope["factor"] = self.number(f"{prefix}factor")
        if kind in ("yarn", "longrope"):
            original = self.size(f"{prefix}original_context_length")
            rope["original_max_position_embeddings"] = original
        if kind != "longrope" and self.number(f"{prefix}attn_factor", 1.0) != 1.0:
            raise Unknown(f"its metadata has {self._name}.{prefix}attn_factor")
        read = {"attn_factor": "attention_factor"} if kind == "longrope" else {}
        if kind == "yarn":
            read = {f"yarn_{name}": name for name in ("beta_fast", "beta_slow")}
            read |= {
                "yarn_attn_factor": "attention_factor",
                "yarn_log_multiplier": "mscale_all_dim",
            }
        rope |= {
            name: self.number(prefix + key) for key, name in read.items() if self.has(prefix + key)
        }
        if rope.get("mscale_all_dim"):
            rope["mscale"] = 1.0
        return rope


def _decimal(value: float) -> float:
    """The shortest decimal number whose float32 is that of `value`."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _floats(file: GGUFFile, name: str) -> list[float]:
    """A vector of the file."""
    if (tensor := file.tensors.get(name)) is None or tensor.kind.name != "F32":
        raise ModelError(f"the GGUF file has no tensor {name} of kind F32")
    found: list[float] = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).tolist()
    return found


def _dtype(file: GGUFFile) -> str:
    """The narrowest dtype that holds all matrices without loss."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")


def describe_gguf(
    file: GGUFFile, settings: Settings, max_model_len: int | None = None
) -> Architecture:
    """The architecture that a file of these `settings_of` has; see `families.describe`.

    Raises:
        Unknown: the settings have what this does not understand.
        ModelError: the file's divisors of frequencies are no vector of float32.
    """
    described = describe(settings, max_model_len, whole=True)
    proportional = file.get("general.architecture", str) == "gemma4"
    if (tensor := file.tensors.get(_ROPE_FACTORS)) is None or proportional:
        return described
    factors = torch.tensor(_floats(file, _ROPE_FACTORS))  # divisors, as Llama 3 has
    if any(rope.frequencies.shape != factors.shape for rope in described.ropes):
        raise Unknown(f"its {_ROPE_FACTORS} is of shape {list(tensor.shape)}")
    ropes = tuple(replace(x, frequencies=x.frequencies / factors) for x in described.ropes)
    return replace(described, ropes=ropes)


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
