"""Tells, for each architecture, how to translate a GGUF file to a config.json and its weights.

llama.cpp's converters leave out what its code knows anyway, such as patterns of layers: `implied`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from radixcache.kernels.spec import Unknown
from radixcache.runtime.model.gguf.metadata import Metadata, floats

_Names = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """How to translate the files of one architecture.

    Attributes:
        family: transformers' name of the model type.
        keys: metadata keys (behind the architecture's name), and the settings they give.
        read: further keys that code reads.
        sizes: settings, and the tensors whose numbers of rows give them.
        flags: settings, and the tensors that exist if they are true.
        implied: settings that files lack, at least some.
        full_every: every n-th layer has no window, unless the file has another pattern.
        gating: how experts are scored: 1 softmax, 2 sigmoid, 3 softmax of the chosen ones; 0 for
            what `adjust` makes of it.
        converted: the converter put RoPE's pairs side by side, in all layers.
        adjust: changes the settings where a config.json needs more, or other ones.
        tiled: whether a delta net's value heads are ordered by their place within a key head first.
    """

    family: str
    keys: _Names = field(default_factory=dict)
    read: tuple[str, ...] = ()
    sizes: _Names = field(default_factory=dict)
    flags: _Names = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    full_every: int = 0
    gating: int = 1
    converted: bool = False
    adjust: Callable[[Metadata, dict[str, Any]], None] | None = None
    tiled: bool = False


COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
_WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern")
_TWO_ROPES = (*_WINDOW, "rope.freq_base_swa")
_GEMMA4_READ = (
    *_TWO_ROPES, "attention.key_length_swa", "attention.value_length_swa",
    "rope.dimension_count_swa",
)  # fmt: skip
_DELTA_READ = ("attention.recurrent_layers", "full_attention_interval", "ssm.inner_size")
_SECTIONS = ("rope.dimension_sections",)  # which text alone turns alike
_QWEN35_READ = (*_DELTA_READ, *_SECTIONS)
_QWEN3_VL_READ = ("n_deepstack_layers", *_SECTIONS)  # which take images only
_CONV = {"shortconv.l_cache": "conv_L_cache"}
_SILU = {"hidden_act": "silu"}
_BIAS = {"attention_bias": "attn_q.bias"}
_OUT_BIAS = {"attention_out_bias": "attn_output.bias"}
_MLP_BIAS = {"mlp_bias": "ffn_up.bias"}


def _experts(
    count: str, used: str = "num_experts_per_tok", inner: str = "intermediate_size"
) -> _Names:
    sizes = {"expert_feed_forward_length": inner}
    return {"expert_count": count, "expert_used_count": used, **sizes}


_MOE_INNER = ("num_experts_per_tok", "moe_intermediate_size")
_INNER = {"moe_intermediate_size": "ffn_up_exps.weight"}
_SHARED = {"shared_expert_intermediate_size": "ffn_up_shexp.weight"}
_SCORED = {
    **_experts("n_routed_experts", *_MOE_INNER),
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_LATENT = {
    **_SCORED, "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
}  # fmt: skip
_LATENT_READ = (
    "attention.key_length_mla", "attention.value_length_mla", "attention.temperature_scale",
    "attention.temperature_length",
)  # fmt: skip
_ALL_SCORED = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    "first_k_dense_replace": 0,
}  # fmt: skip
_ANY_LATENT = {
    **_ALL_SCORED, "q_lora_rank": None, "n_routed_experts": None, "n_shared_experts": 0,
    "num_experts_per_tok": None, "moe_intermediate_size": None,
}  # fmt: skip
_GROUPS = {("deepseek_v2", 160): (8, 3), ("deepseek_v3", 256): (8, 4)}
"""Groups of experts, and those that are kept, by family and number, in files that do not say."""
_GLM_FLASH = (154_880, (47, 48))
"""Vocabulary and blocks of GLM-4.7-Flash, whose files may not say how experts are scored."""
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_COHERE = {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"}
_ONES = dict.fromkeys(_MULTIPLIERS.values(), 1.0)
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}


def _ssm(*names: str) -> _Names:
    keys = ("conv_kernel", "group_count", "state_size", "time_step_rank")
    return {f"ssm.{key}": name for key, name in zip(keys, names, strict=True)}


_DELTA = _ssm(*(f"linear_{x}" for x in (
    "conv_kernel_dim", "num_key_heads", "key_head_dim", "num_value_heads",
)))  # fmt: skip
_MAMBA = _ssm("mamba_d_conv", "mamba_n_groups", "mamba_d_state", "mamba_n_heads")
_NEMOTRON = _ssm("conv_kernel", "n_groups", "ssm_state_size", "mamba_num_heads")
_NEMOTRON_FLAGS = {**_BIAS, **_MLP_BIAS, "use_conv_bias": "ssm_conv1d.bias"}
_NEMOTRON_SAYS = {"mlp_hidden_act": "relu2", "intermediate_size": None}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}

_NOT_TURNED = torch.tensor(1e30).item()
"""A frequency divisor that means no rotation."""


def _llama(m: Metadata, found: dict[str, Any]) -> None:
    if count := m.size("expert_count", 0):
        active = m.size("expert_used_count")
        found |= {"model_type": "mixtral", "num_local_experts": count}
        found["num_experts_per_tok"] = active
    elif "sliding_window" in found:
        found["model_type"] = "mistral"


def _ministral3(m: Metadata, found: dict[str, Any]) -> None:
    if m.has("attention.temperature_scale"):
        scale = m.number("attention.temperature_scale")
        found["rope_parameters"]["llama_4_scaling_beta"] = scale
    else:
        found["model_type"] = "mistral"


def _two_ropes(m: Metadata, found: dict[str, Any], local: float = 10_000.0) -> None:
    """Gives layers with a window their own RoPE base."""
    near = {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", local)}
    found["rope_parameters"] = {
        "sliding_attention": near, "full_attention": found["rope_parameters"],
    }  # fmt: skip


def _gemma2(m: Metadata, found: dict[str, Any], large: int = 46) -> None:
    """Tells the 27B by its number of layers, as llama.cpp does."""
    of_heads = found["hidden_size"] // found["num_attention_heads"]
    found["query_pre_attn_scalar"] = of_heads if m.layers == large else found["head_dim"]


def _gemma3(m: Metadata, found: dict[str, Any]) -> None:
    _gemma2(m, found, large=62)
    _two_ropes(m, found)


def _gemma4(m: Metadata, found: dict[str, Any]) -> None:
    """Layers without a window have other heads, and RoPE turns only their first pairs; those that
    share keys may have wider MLPs."""
    sizes, found["enable_moe_block"] = m.per_layer("feed_forward_length"), found["num_experts"] > 0
    found["intermediate_size"], found["use_double_wide_mlp"] = sizes[0], sizes[-1] != sizes[0]
    kv_heads = m.heads()[1]
    wide, slides = found["head_dim"], [t == "sliding_attention" for t in found["layer_types"]]
    divisors = floats(m.file, "rope_freqs.weight")
    turned = divisors.count(1.0)
    rope, near = found["rope_parameters"], m.size("attention.key_length_swa")
    whole = "partial_rotary_factor" not in rope and near == m.size("rope.dimension_count_swa", near)
    if not whole or divisors != [1.0] * turned + [_NOT_TURNED] * (wide // 2 - turned):
        raise Unknown("its RoPE turns other parts of a head")
    if rope["rope_type"] not in ("default", "linear"):
        raise Unknown(f"its RoPE is {rope['rope_type']}, for a part of a head")
    if near != m.size("attention.value_length_swa", near):
        raise Unknown("its values are of another size than its keys")
    found["head_dim"] = near
    found["num_key_value_heads"] = kv_heads[slides.index(True) if True in slides else 0]
    found["per_layer_config"] = {
        str(i): {"head_dim": wide, "num_key_value_heads": kv_heads[i]}
        for i, slide in enumerate(slides)
        if not slide
    }
    first = slides.index(False) if False in slides else 0
    found["attention_k_eq_v"] = f"blk.{first}.attn_v.weight" not in m.file.tensors
    rope |= {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / wide}
    _two_ropes(m, found)


def _olmo2(m: Metadata, found: dict[str, Any]) -> None:
    if "sliding_window" in found:
        found["model_type"] = "olmo3"
        _two_ropes(m, found, found["rope_parameters"]["rope_theta"])
    else:
        del found["layer_types"]


def _phi3(m: Metadata, found: dict[str, Any]) -> None:
    if (rope := found["rope_parameters"])["rope_type"] == "longrope":
        name = "original_max_position_embeddings"
        found[name] = rope[name]


def _gpt_oss(m: Metadata, found: dict[str, Any]) -> None:
    if (rope := found["rope_parameters"])["rope_type"] == "yarn":
        rope["truncate"] = False


def _granite(m: Metadata, found: dict[str, Any]) -> None:
    if not m.flag("rope.scaling.finetuned", True):
        raise Unknown("its layers have no RoPE")
    if shared := m.rows("ffn_up_shexp.weight"):
        found |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


def _granite_hybrid(m: Metadata, found: dict[str, Any]) -> None:
    shared = m.rows("ffn_up_shexp.weight") or m.rows("ffn_up.weight")
    found |= {"shared_intermediate_size": shared, "mamba_d_head": m.inner()}
    found["mamba_expand"] = m.size("ssm.inner_size") // found["hidden_size"]
    turned = m.flag("rope.scaling.finetuned", True)
    found["position_embedding_type"] = "rope" if turned else "nope"
    found["layer_types"] = ["attention" if n else "mamba" for n in m.heads()[1]]


def _smollm3(m: Metadata, found: dict[str, Any]) -> None:
    found["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(m.layers)]


def _exaone_moe(m: Metadata, found: dict[str, Any]) -> None:
    dense = found.pop("first_k_dense_replace")
    found["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(m.layers)]


def _ernie_moe(m: Metadata, found: dict[str, Any]) -> None:
    found["moe_layer_end_index"] = m.layers - 1


def _lfm2(m: Metadata, found: dict[str, Any]) -> None:
    found["norm_eps"] = found.pop("rms_norm_eps")
    found["layer_types"] = ["full_attention" if n else "conv" for n in m.heads()[1]]


def _latent(m: Metadata, found: dict[str, Any]) -> None:
    """Tells the families of MLA apart, which share an architecture, by how experts are scored."""
    heads, turned = found["num_attention_heads"], found["head_dim"]
    whole = m.size("attention.key_length_mla", m.size("attention.key_length"))
    if whole <= turned:
        raise Unknown(f"its RoPE turns {turned} of {whole} elements of a head")
    found["v_head_dim"] = m.size("attention.value_length_mla", m.size("attention.value_length"))
    found |= {"qk_rope_head_dim": turned, "qk_nope_head_dim": whole - turned}
    if found["num_key_value_heads"] == 1:  # of latents
        found["num_key_value_heads"] = heads
    vocabulary, blocks = _GLM_FLASH
    is_glm = found["vocab_size"] == vocabulary and m.size("block_count") in blocks
    gating = m.size("expert_gating_func", 0) or (2 if is_glm else 1)
    family = "mistral4" if found["norm_topk_prob"] else "deepseek_v2"
    family = {1: family, 2: "deepseek_v3"}.get(gating, "")
    if not found["n_routed_experts"]:
        family = "youtu"
        for name in {*_SCORED.values()} & found.keys():
            del found[name]
    if not family or m.name not in ("deepseek2", family):
        raise Unknown("its experts are scored in another way")
    found["model_type"], rope = family, found["rope_parameters"]
    if rope.get("mscale_all_dim"):  # a tenth of it is stored
        rope["mscale_all_dim"] = round(10 * rope["mscale_all_dim"], 6)
        rope["mscale"] = rope["mscale_all_dim"] if m.name == "deepseek2" else 1.0
    if family == "mistral4":
        found["head_dim"], rope["partial_rotary_factor"] = whole, turned / whole
        beta = 0.1 if m.name == "mistral4" else 0.0  # converters leave out that of Small 4
        rope["llama_4_scaling_beta"] = m.number("attention.temperature_scale", beta) or None
        length = rope.get("original_max_position_embeddings", 0)
        if m.size("attention.temperature_length", length) != length:
            raise Unknown("its queries are scaled by another length than its RoPE")
    elif m.has("attention.temperature_scale"):
        raise Unknown(f"its metadata has {m.name}.attention.temperature_scale")
    groups = _GROUPS.get((family, found.get("n_routed_experts", 0)))
    if groups is not None and not m.has("expert_group_count"):
        found["n_group"], found["topk_group"] = groups
    if family == "deepseek_v2":
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"


def _kimi(m: Metadata, found: dict[str, Any]) -> None:
    turned, whole = found["head_dim"], m.size("attention.key_length_mla")
    found |= {"qk_rope_head_dim": turned, "qk_nope_head_dim": whole - turned}
    found["v_head_dim"] = m.size("attention.value_length_mla")
    found["num_key_value_heads"] = found["linear_num_heads"] = found["num_attention_heads"]
    found["layer_types"] = ["full_attention" if n else "linear_attention" for n in m.heads()[1]]


def _nemotron(m: Metadata, found: dict[str, Any]) -> None:
    sizes = m.per_layer("feed_forward_length")
    mlp = "moe" if m.size("expert_count", 0) else "mlp"
    found |= {"intermediate_size": max(sizes, default=0), "mamba_head_dim": m.inner()}
    found["layer_norm_epsilon"] = found.pop("rms_norm_eps")
    found.pop("first_k_dense_replace", None)
    found["layers_block_type"] = [
        "attention" if heads else mlp if size else "mamba"
        for heads, size in zip(m.heads()[1], sizes, strict=True)
    ]


def _delta(m: Metadata, found: dict[str, Any]) -> None:
    found["linear_value_head_dim"] = m.inner()
    key, every = "attention.recurrent_layers", m.size("full_attention_interval", 4)
    delta = [(i + 1) % every != 0 for i in range(m.layers)]
    if m.is_array(key):
        delta = m.file.array(f"{m.name}.{key}", bool)[: m.layers]
    found["layer_types"] = ["linear_attention" if x else "full_attention" for x in delta]


ROWS: dict[str, Row] = {
    "llama": Row(
        "llama", read=("attention.sliding_window",), implied=_SILU, flags={**_BIAS, **_MLP_BIAS},
        converted=True, adjust=_llama,
    ),
    "arcee": Row("arcee", flags={**_BIAS, **_MLP_BIAS}, converted=True),
    "mistral3": Row(
        "ministral3", read=("attention.sliding_window", "attention.temperature_scale"),
        implied={"sliding_window": None}, converted=True, adjust=_ministral3,
    ),
    "qwen2": Row("qwen2", implied=_SILU),
    "qwen3": Row("qwen3", implied=_SILU, flags=_BIAS),
    "qwen2vl": Row("qwen2_vl_text", read=_SECTIONS),
    "qwen3vl": Row("qwen3_vl_text", read=_QWEN3_VL_READ, flags=_BIAS),
    "qwen2moe": Row(
        "qwen2_moe", keys=_experts("num_experts", *_MOE_INNER), sizes={**_INNER, **_SHARED},
        flags={"qkv_bias": "attn_q.bias"}, implied={"norm_topk_prob": False, **_SPARSE},
    ),
    "qwen3moe": Row(
        "qwen3_moe", keys=_experts("num_experts", *_MOE_INNER), sizes=_INNER, flags=_BIAS,
        implied={"norm_topk_prob": True, **_SPARSE},
    ),
    "qwen3vlmoe": Row(
        "qwen3_vl_moe_text", read=_QWEN3_VL_READ, keys=_experts("num_experts", *_MOE_INNER),
        sizes=_INNER, flags=_BIAS, implied=_SPARSE,
    ),
    "gemma": Row("gemma", implied={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Row(
        "gemma2", read=_WINDOW, keys=_SOFTCAPS,
        implied={**_GELU, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_every=2, adjust=_gemma2,
    ),
    "gemma3": Row(
        "gemma3_text", read=_TWO_ROPES, keys={"final_logit_softcapping": "final_logit_softcapping"},
        implied={**_GELU, "sliding_window": None, "final_logit_softcapping": None}, full_every=6,
        adjust=_gemma3,
    ),
    "gemma4": Row(
        "gemma4_text", read=_GEMMA4_READ,
        keys={
            **_experts("num_experts", "top_k_experts", "moe_intermediate_size"),
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
        implied={
            **_GELU, "final_logit_softcapping": None, "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0, "num_experts": 0, "top_k_experts": None,
            "moe_intermediate_size": None, "intermediate_size": None,
        },
        adjust=_gemma4,
    ),
    "phi3": Row(
        "phi3", read=("attention.sliding_window",), implied={"sliding_window": None}, adjust=_phi3,
    ),
    "olmo2": Row("olmo2", read=_TWO_ROPES, full_every=4, adjust=_olmo2),
    "exaone4": Row("exaone4", read=_WINDOW, implied={"sliding_window": None}, full_every=4),
    "exaone-moe": Row(
        "exaone_moe", read=_WINDOW,
        keys={
            **_SCORED, **_experts("num_experts", *_MOE_INNER),
            "expert_shared_count": "num_shared_experts",
        },
        sizes=_INNER, implied={**_ALL_SCORED, "sliding_window": None}, full_every=4, gating=2,
        adjust=_exaone_moe,
    ),
    "glm4": Row("glm4", flags=_BIAS),
    "command-r": Row("cohere", keys=_COHERE),
    "cohere2": Row("cohere2", read=_WINDOW, keys=_COHERE, full_every=4),
    "granite": Row(
        "granite", keys=_MULTIPLIERS, flags={**_BIAS, **_MLP_BIAS}, implied=_ONES,
        converted=True, adjust=_granite,
    ),
    "granitemoe": Row(
        "granitemoe", keys={**_MULTIPLIERS, **_experts("num_local_experts")}, flags=_BIAS,
        implied=_ONES, converted=True, adjust=_granite,
    ),
    "granitehybrid": Row(
        "granitemoehybrid", read=("ssm.inner_size",),
        keys={**_MULTIPLIERS, **_MAMBA, **_experts("num_local_experts")},
        flags={**_BIAS, "mamba_conv_bias": "ssm_conv1d.bias"},
        implied={**_ONES, "num_local_experts": 0, "num_experts_per_tok": 1}, converted=True,
        adjust=_granite_hybrid,
    ),
    "smollm3": Row("smollm3", flags={**_BIAS, **_MLP_BIAS}, converted=True, adjust=_smollm3),
    "ernie4_5": Row("ernie4_5", flags={"use_bias": "attn_output.bias"}),
    "ernie4_5-moe": Row(
        "ernie4_5_moe",
        keys={
            **_experts("moe_num_experts", "moe_k", "moe_intermediate_size"),
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        sizes=_INNER, flags={"use_bias": "attn_output.bias"},
        implied={"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        adjust=_ernie_moe,
    ),
    "seed_oss": Row("seed_oss", flags={**_BIAS, **_OUT_BIAS, **_MLP_BIAS}),
    "gpt-oss": Row(
        "gpt_oss", read=_WINDOW, keys=_experts("num_local_experts"),
        implied={"attention_bias": True}, full_every=2, gating=3, adjust=_gpt_oss,
    ),
    "glm4moe": Row(
        "glm4_moe", read=_SECTIONS, keys=_SCORED, sizes=_INNER,
        flags={**_BIAS, "use_qk_norm": "attn_q_norm.weight"}, implied=_ALL_SCORED, gating=2,
    ),
    "deepseek2": Row(
        "deepseek_v3", read=_LATENT_READ, keys=_LATENT, sizes=_INNER, implied=_ANY_LATENT, gating=0,
        adjust=_latent,
    ),
    "mistral4": Row(
        "mistral4", read=_LATENT_READ, keys=_LATENT, sizes=_INNER,
        implied={**_ANY_LATENT, "norm_topk_prob": True}, gating=0, adjust=_latent,
    ),
    "kimi-linear": Row(
        "kimi_linear", read=_LATENT_READ, sizes=_INNER, gating=2, adjust=_kimi,
        keys={**_LATENT, "ssm.conv_kernel": "linear_conv_kernel_dim",
              "kda.head_dim": "linear_head_dim"},
        implied={**_ANY_LATENT, "norm_topk_prob": True},
    ),
    "dots1": Row("dots1", keys=_SCORED, sizes=_INNER, flags=_BIAS, implied=_ALL_SCORED, gating=2),
    "minimax-m2": Row("minimax_m2", keys=_experts("num_local_experts"), gating=2),
    "olmoe": Row(
        "olmoe", keys=_experts("num_experts"), flags=_BIAS, implied={"norm_topk_prob": False},
    ),
    "qwen3next": Row(
        "qwen3_next", read=_DELTA_READ, keys={**_DELTA, **_experts("num_experts", *_MOE_INNER)},
        sizes={**_INNER, **_SHARED}, flags=_BIAS, implied={"norm_topk_prob": True, **_SPARSE},
        adjust=_delta,
    ),
    "qwen35": Row(
        "qwen3_5_text", read=_QWEN35_READ, keys=_DELTA, flags=_BIAS, adjust=_delta, tiled=True,
    ),
    "qwen35moe": Row(
        "qwen3_5_moe_text", read=_QWEN35_READ,
        keys={**_DELTA, **_experts("num_experts", *_MOE_INNER)}, sizes={**_INNER, **_SHARED},
        flags=_BIAS, tiled=True, adjust=_delta,
    ),
    "lfm2": Row(
        "lfm2", keys=_CONV, implied={"block_auto_adjust_ff_dim": False, "conv_bias": False},
        adjust=_lfm2,
    ),
    "lfm2moe": Row(
        "lfm2_moe",
        keys={
            **_CONV, **_experts("num_experts", *_MOE_INNER),
            "leading_dense_block_count": "num_dense_layers",
        },
        sizes=_INNER, flags={"use_expert_bias": "exp_probs_b.bias"},
        implied={"num_dense_layers": 0, "norm_topk_prob": True, "conv_bias": False}, gating=2,
        adjust=_lfm2,
    ),
    "nemotron_h": Row(
        "nemotron_h", read=("ssm.inner_size",), keys=_NEMOTRON, flags=_NEMOTRON_FLAGS,
        implied=_NEMOTRON_SAYS, converted=True, adjust=_nemotron,
    ),
    "nemotron_h_moe": Row(
        "nemotron_h", read=("ssm.inner_size",), flags=_NEMOTRON_FLAGS,
        keys={**_NEMOTRON, **_SCORED, "moe_latent_size": "moe_latent_size"},
        sizes={**_INNER, "moe_shared_expert_intermediate_size": "ffn_up_shexp.weight"},
        implied={**_NEMOTRON_SAYS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
                 "moe_latent_size": None},
        converted=True, gating=2, adjust=_nemotron,
    ),
}  # fmt: skip
"""Rows by llama.cpp's architecture names."""
