"""The names of weights in safetensors files, as transformers saves them or as the hub has them."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from radixcache.kernels.spec import MLP, Architecture
from radixcache.runtime.model.checkpoint import is_spare
from radixcache.runtime.model.families.table import FAMILIES
from radixcache.runtime.model.weights.plan import CONVS, SHARED, Names, Naming

# Where the text of a model is, and what else it may be beside; of the others all is text.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
_TEXT_PREFIXES = ("model.", "backbone.")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight")
_LAST_NORMS = ("norm.weight", "embedding_norm.weight", "norm_f.weight", "final_layernorm.weight")
_HEADS = ["lm_head.weight", "language_model.lm_head.weight"]
_PER_LAYER = {
    "table": "embed_tokens_per_layer.weight", "projection": "per_layer_model_projection.weight",
    "norm": "per_layer_projection_norm.weight",
}  # fmt: skip
_MIXERS = ("self_attn", "linear_attn", "mamba", "conv", "mixer", "attention")
_MIXER = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "gate_proj": "q_gate",
    "o_proj": "o", "out_proj": "o", "q_norm": "query_norm", "q_layernorm": "query_norm",
    "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b", "kv_b_proj": "kv_b",
    "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm",
    "k_norm": "key_norm", "k_layernorm": "key_norm", "sinks": "sinks", "conv": "conv",
    "conv1d": "conv", "in_proj": "in", "in_proj_qkv": "in", "in_proj_z": "z",
    "in_proj_qkvz": "qkvz", "in_proj_ba": "ba", "in_proj_b": "b", "in_proj_a": "a",
    "A_log": "rate", "dt_bias": "rate_bias", "D": "skip", "norm": "mixer_norm",
    "o_norm": "mixer_norm", "b_proj": "b", "f_proj": "a", "f_a_proj": "a_a", "f_b_proj": "a_b",
    "g_proj": "z", "g_a_proj": "z_a", "g_b_proj": "z_b", "q_conv1d": "q_conv",
    "k_conv1d": "k_conv", "v_conv1d": "v_conv", "dense": "o",
}  # fmt: skip
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "mixer")
_MLP = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up",
    "w1": "gate", "w3": "up", "w2": "down", "input_linear": "gate_up", "output_linear": "down",
    "gate": "router", "router": "router", "router.layer": "router",
    "shared_expert_gate": "shared.router", "fc1_latent_proj": "latent_in",
    "fc2_latent_proj": "latent_out",
}  # fmt: skip
_NORMS = ("input_norm", "attended_norm", "mlp_norm", "after_norm", "query_norm", "key_norm")
_THEN = {**dict.fromkeys(_NORMS, "plus offset"), "rate": "negative exp"}
_THEN |= dict.fromkeys(("conv", *CONVS), "transpose")
_THEN["router_norm"] = "over root of size"
_OTHERS = {
    "layer_scalar": "layer_scale", "router.proj": "router",
    "router.per_expert_scale": "expert_scale", "per_layer_input_gate": "per_layer.up",
    "per_layer_projection": "per_layer.down",
}  # fmt: skip


def name_checkpoint(architecture: Architecture, stored: Collection[str]) -> Naming:
    """The names of this family's tensors, of which these are `stored`."""
    found = {name[: -len(end)] for name in stored for end in _EMBEDDINGS if name.endswith(end)}
    prefix = next((at for at in (*_PREFIXES, *_TEXT_PREFIXES) if at in found), "")
    layer_of = re.compile(re.escape(prefix) + r"layers\.(\d+)\.(.*)").fullmatch
    family, count = FAMILIES[architecture.family], len(architecture.layers)

    def spare(name: str) -> bool:
        """Whether a tensor is not for the layers of a text's next token, but for images, say."""
        text = prefix in _TEXT_PREFIXES or name.startswith(prefix) or name in _HEADS
        unread = False
        if (at := layer_of(name)) and (number := int(at[1])) >= count:
            unread = family.spare_layers
        elif at and architecture.layers[number].shares_kv:
            unread = _name(at[2], True).removesuffix(".bias") in SHARED
        return bool(not text or unread or is_spare(name))

    tensors: list[dict[str, str]] = [{} for _ in architecture.layers]
    for name in stored:
        if (match := layer_of(name)) and (number := int(match[1])) < count:
            layer = architecture.layers[number]
            ours = _name(match[2], isinstance(layer.mlp, MLP))
            ours = next((norm for norm in layer.norms if family.norms[norm] == ours), ours)
            tensors[number][ours] = name
    layers = []
    for names in tensors:
        then = _THEN
        if family.alternating and names.get("experts.down", "").endswith("_proj"):  # no MXFP4
            then = {**_THEN, "experts.gate_up": "transpose", "experts.down": "transpose"}
        layers.append(Names(names, then, family.alternating))
    embeddings, last_norms = ([prefix + x for x in ends] for ends in (_EMBEDDINGS, _LAST_NORMS))
    per_layer = {ours: prefix + name for ours, name in _PER_LAYER.items()}
    return Naming(embeddings, _HEADS, last_norms, "plus offset", layers, spare, per_layer)


@lru_cache(4096)
def _name(stored: str, dense: bool) -> str:
    """A name below a layer as `Names` has it; those of norms stay."""
    stored = stored.removesuffix(".weight").removeprefix("moe.").replace(".switch_glu", "")
    if stored.startswith("experts."):  # Gemma 4's, which stand beside an MLP
        stored = f"mlp.{stored}"
    place, _, stem = stored.removesuffix(".bias").replace("switch_mlp", "experts").partition(".")
    end = ".bias" * stored.endswith(".bias")
    if place in _MIXERS and stem in _MIXER:
        return _MIXER[stem] + end
    if place not in _MLPS:
        return _OTHERS.get(stored, stored)
    if stem.endswith(("e_score_correction_bias", "expert_bias")):
        return "correction"
    if place == "block_sparse_moe" and stem in ("input_linear", "output_linear"):
        stem = f"experts.{stem}"
    if place == "shared_mlp" and not dense:
        stem = f"shared_expert.{stem}"
    above, dot, part = stem.rpartition(".")
    if part.endswith("_bias"):  # of all experts
        part, end = part.removesuffix("_bias"), ".bias"
    if above.startswith("shared_expert"):
        above = "shared"
    return _MLP.get(stem, f"{above}{dot}{_MLP.get(part, part)}") + end
