"""Describes the forward pass of a checkpoint of a known family, from its config.

The decoder loop runs a model only if this file understands every setting of its config. An unknown
setting may change the forward pass, so transformers' own layers run then, as for other families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixcache.errors import first_sentence
from radixcache.kernels.attention import LayerKind
from radixcache.runtime.model.description import Unknown as Unknown

# Settings of these families that `understand` reads.
_READ = frozenset({
    "attention_bias", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings",
    "use_sliding_window", "vocab_size",
})  # fmt: skip
# Settings that do not change the forward pass, or only repeat others.
_INERT = frozenset({
    "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "id2label", "initializer_range", "label2id", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "unk_token_id", "use_cache",
})  # fmt: skip
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")

Shapes = dict[str, tuple[int, ...]]


class Architecture(NamedTuple):
    """A pre-norm decoder with RMSNorm, RoPE, grouped queries and a gated MLP.

    Attributes:
        family: transformers' name of the model type.
        inverse_frequencies: [head_dim / 2] float32; the pair (i, i + head_dim / 2) of a head turns
            by position times the i-th.
        rope_scale: factor on the cosines and sines.
        kinds: the attention of each layer.
        qkv_bias, out_bias, mlp_bias: whether these products have a bias.
        head_norms: whether queries and keys are normalised before RoPE.
        tied: whether the embedding is also the output layer's weight.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_context: int
    eos_token_id: int | list[int] | None
    eps: float
    inverse_frequencies: torch.Tensor
    rope_scale: float
    kinds: list[LayerKind]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    tied: bool

    def layer_shapes(self, layer: int) -> Shapes:
        """The weights of a layer by their names after `model.layers.N.`."""
        kind, hidden, inner = self.kinds[layer], self.hidden_size, self.intermediate_size
        queries, keys = kind.query_heads * kind.head_dim, kind.kv_heads * kind.head_dim
        shapes: Shapes = {"input_layernorm.weight": (hidden,)}
        shapes["post_attention_layernorm.weight"] = (hidden,)
        if self.head_norms:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (kind.head_dim,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, self.qkv_bias),
            ("self_attn.k_proj", keys, hidden, self.qkv_bias),
            ("self_attn.v_proj", keys, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, queries, self.out_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    def shapes(self) -> Shapes:
        """All weights of the checkpoint by their names."""
        shapes: Shapes = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for layer in range(len(self.kinds)):
            for name, shape in self.layer_shapes(layer).items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes


def understand(settings: Mapping[str, Any]) -> Architecture:
    """The architecture that the settings of a config.json describe.

    transformers' config class has defaults, but importing it takes longer than all of this. So a
    config that lacks a setting whose default is not `false` is left to transformers.

    Raises:
        Unknown: another family, or a setting that is not understood.
    """
    family = settings.get("model_type")
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        raise Unknown(f"no loop for {family}")
    for name, value in settings.items():
        if name not in _READ | _INERT and value is not None and value is not False:
            raise Unknown(f"its config has {name}")
    try:
        return _read(settings, family)
    except Unknown:
        raise
    except KeyError as missing:
        raise Unknown(f"its config lacks {missing}") from None
    except Exception as error:  # whatever nonsense raises, here and in transformers
        raise Unknown(f"its config does not make sense ({first_sentence(error)})") from None


def _read(settings: Mapping[str, Any], family: str) -> Architecture:
    if settings["hidden_act"] != "silu":
        raise Unknown(f"its activation is {settings['hidden_act']}")
    hidden, heads = _size(settings, "hidden_size"), _size(settings, "num_attention_heads")
    kv_heads, dim = heads, hidden // heads
    if settings["num_key_value_heads"] is not None:
        kv_heads = _size(settings, "num_key_value_heads")
    if family == "qwen3" or settings.get("head_dim") is not None:
        dim = _size(settings, "head_dim")
    if heads % kv_heads or dim % 2:
        raise Unknown(f"its heads are {heads} on {kv_heads} of {dim}")
    eos = settings.get("eos_token_id")
    if any(type(token) is not int for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise Unknown(f"its eos_token_id is {eos}")
    frequencies, scale = _rope(settings, dim)
    bias = bool(settings.get("attention_bias"))
    return Architecture(
        family=family,
        vocab_size=_size(settings, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(settings, "intermediate_size"),
        max_context=_size(settings, "max_position_embeddings"),
        eos_token_id=eos,
        eps=float(settings["rms_norm_eps"]),
        inverse_frequencies=frequencies,
        rope_scale=scale,
        kinds=[
            LayerKind(heads, kv_heads, dim, dim, dim**-0.5, window)
            for window in _windows(settings, family)
        ],
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(settings.get("mlp_bias")),
        head_norms=family == "qwen3",
        tied=bool(settings.get("tie_word_embeddings")),
    )


def _size(settings: Mapping[str, Any], name: str) -> int:
    """A setting that must be a positive whole number."""
    size = settings[name]
    if type(size) is not int or size < 1:
        raise Unknown(f"its {name} is {size}")
    return size


def _windows(settings: Mapping[str, Any], family: str) -> list[int | None]:
    """The window of each layer; each family has its own settings for it."""
    count, types = _size(settings, "num_hidden_layers"), settings.get("layer_types")
    window = settings["sliding_window"] if family == "mistral" else settings.get("sliding_window")
    if family in ("llama", "mistral"):
        slides = [window is not None] * count
        known = types is None and (family == "mistral" or window is None)
    elif types is None:
        window = window if settings.get("use_sliding_window") else None
        first = count if window is None else settings["max_window_layers"]
        slides, known = [layer >= first for layer in range(count)], True
    else:
        slides = [kind == "sliding_attention" for kind in types]
        known = len(types) == count and set(types) <= {"full_attention", "sliding_attention"}
        known = known and (bool(settings.get("use_sliding_window")) or not any(slides))
    if not known:
        raise Unknown("its layers are of other types")
    return [_size(settings, "sliding_window") if slide else None for slide in slides]


def _rope(settings: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """The inverse frequencies of a head's pairs, and the factor on cosines and sines."""
    rope = settings.get("rope_parameters")
    if rope is not None and settings.get("rope_scaling"):
        raise Unknown("its config says RoPE twice")
    if rope is None:  # as it was written before transformers 5
        rope = {"rope_theta": settings["rope_theta"], **(settings.get("rope_scaling") or {})}
        rope.setdefault("rope_type", rope.pop("type", "default"))
    kind = rope.get("rope_type")
    if kind not in _ROPE_KINDS or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unknown(f"its RoPE is {kind or 'not one for all layers'}")
    if kind == "default":
        steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / rope["rope_theta"] ** steps, 1.0
    needed: dict[str, Any] = {"rope_parameters": dict(rope), "head_dim": dim}
    for name in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        needed[name] = settings[name]
    config = PreTrainedConfig(**needed)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)
