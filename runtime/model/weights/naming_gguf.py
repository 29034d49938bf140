"""The names of weights in GGUF files, which llama.cpp gives."""

from __future__ import annotations

import re
from collections.abc import Container

from radixcache.kernels.spec import ATTENDS, Architecture, DeltaNet, Layer, ShortConv
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.model.gguf.architectures import ROWS
from radixcache.runtime.model.weights.plan import CONVS, SHARED, Names, Naming

_PARTS = {
    "input_norm": "attn_norm", "attended_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "after_norm": "post_ffw_norm", "layer_scale": "layer_output_scale", "qkv": "attn_qkv",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "query_norm": "attn_q_norm", "key_norm": "attn_k_norm", "sinks": "attn_sinks",
    "q_a": "attn_q_a", "q_a_norm": "attn_q_a_norm", "q_b": "attn_q_b", "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm", "kv_b": "attn_kv_b", "k_b": "attn_k_b", "v_b": "attn_v_b",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
    "shared.router": "ffn_gate_inp_shexp", "gate_up": "ffn_up", "shared.gate_up": "ffn_up_shexp",
    "experts.gate_up": "ffn_gate_up_exps", "mlp_out_norm": "post_ffw_norm_1",
    "expert_norm": "pre_ffw_norm_2", "expert_out_norm": "post_ffw_norm_2",
    "latent_in": "ffn_latent_down", "latent_out": "ffn_latent_up",
    "per_layer_norm": "post_norm", "per_layer.up": "inp_gate", "per_layer.down": "proj",
}  # fmt: skip
_PER_LAYER = {
    "table": "per_layer_token_embd.weight", "projection": "per_layer_model_proj.weight",
    "norm": "per_layer_proj_norm.weight",
}  # fmt: skip
_SHORT_CONV = {"in": "shortconv.in_proj", "conv": "shortconv.conv", "o": "shortconv.out_proj"}
_MAMBA = {"in": "ssm_in", "conv": "ssm_conv1d", "mixer_norm": "ssm_norm", "o": "ssm_out"}
_DELTA_NET = {
    **_MAMBA, "in": "attn_qkv", "z": "attn_gate", "qkvz": "ssm_in", "ba": "ssm_ba",
    "b": "ssm_beta", "a": "ssm_alpha",
}  # fmt: skip
_KDA = {
    **_MAMBA, "b": "ssm_beta", "a_a": "ssm_f_a", "a_b": "ssm_f_b", "z_a": "ssm_g_a",
    "z_b": "ssm_g_b", "o": "attn_output", "q_conv": "ssm_conv1d_q", "k_conv": "ssm_conv1d_k",
    "v_conv": "ssm_conv1d_v",
}  # fmt: skip
_WHOLE = {
    "rate": "ssm_a", "skip": "ssm_d", "rate_bias": "ssm_dt.bias", "correction": "exp_probs_b.bias",
    "router_norm": "ffn_gate_inp.scale", "expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
_THEN = {"router_norm": "over root of size", **dict.fromkeys(("conv", *CONVS), "transpose")}
_UNUSED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_TOWERS = ("v.", "a.", "mm.")  # encoders of images and sounds, whose text part is read


def name_gguf(architecture: Architecture, file: GGUFFile) -> Naming:
    """The names of this architecture's tensors in the file."""
    name, count = file.get("general.architecture", str), len(architecture.layers)
    row, last = ROWS[name], file.get(f"{name}.block_count", int)

    def is_spare(tensor: str) -> bool:
        if tensor in _UNUSED or tensor.startswith(_TOWERS):
            return True
        if (block := re.match(r"blk\.(\d+)\.(\w+)", tensor)) is None:
            return False
        if (number := int(block[1])) >= count:  # for further tokens (MTP)
            return number < last
        shares = architecture.layers[number].shares_kv
        return shares and block[2] in [_PARTS[name] for name in SHARED]

    layers = [
        Names(_names(f"blk.{number}.", layer, file.tensors), _THEN, False, row.converted, row.tiled)
        for number, layer in enumerate(architecture.layers)
    ]
    last_norms = ["output_norm.weight", "token_embd_norm.weight"]  # the latter is LFM's
    embeddings, heads = ["token_embd.weight"], ["output.weight"]
    return Naming(embeddings, heads, last_norms, "", layers, is_spare, _PER_LAYER)


def _names(at: str, layer: Layer, stored: Container[str]) -> dict[str, str]:
    parts = _PARTS
    if isinstance(layer.mixer, ShortConv):
        parts = parts | _SHORT_CONV
    elif isinstance(layer.mixer, DeltaNet):
        parts = parts | (_KDA if layer.mixer.by_channel else _DELTA_NET)
    elif not isinstance(layer.mixer, ATTENDS | None):
        parts = parts | _MAMBA
    if f"{at}ffn_norm.weight" not in stored and "attended_norm" not in layer.norms:
        # Some files name the MLP's norm by its place behind attention.
        parts = {**parts, "mlp_norm": "post_attention_norm"}
    if layer.mixer is None:
        parts = {**parts, "mlp_norm": "attn_norm"}
    names = {ours: f"{at}{part}.weight" for ours, part in parts.items()}
    names |= {f"{ours}.bias": f"{at}{part}.bias" for ours, part in parts.items()}
    return names | {ours: f"{at}{part}" for ours, part in _WHOLE.items()}
