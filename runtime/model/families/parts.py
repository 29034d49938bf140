"""Experts and recurrent layers of families, from their settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixcache.kernels.spec import MLP, DeltaNet, Experts, Mamba2, ShortConv, Unknown
from radixcache.runtime.model.families.config import Config
from radixcache.runtime.model.families.family import Family

_SIGMOID: dict[str, Any] = {"scores": "sigmoid", "correction": True}
_OF_EXPERTS = (
    "moe_intermediate_size", "n_group", "norm_topk_prob", "num_experts_per_tok",
    "routed_scaling_factor", "topk_group", "topk_method",
)  # fmt: skip


def _experts(
    config: Config, family: Family, count: str, inner: str, shared: int = 0, **more: Any
) -> Experts:
    """Experts of these settings, and a shared one of this size; `more` are fields of `Experts`."""
    active = config.size("moe_k" if config.maybe("moe_k") else "num_experts_per_tok")
    each = replace(family.dense(config, inner), bias=False)
    one = family.dense(config, shared) if shared else None
    return Experts(config.size(count), active, each, shared=one, **more)


def qwen(config: Config, family: Family, number: int) -> MLP | Experts:
    """Experts in every n-th layer; one is shared and gated, if the config has one."""
    step, dense = config.maybe("decoder_sparse_step") or 1, config.maybe("mlp_only_layers") or []
    if number in dense or (number + 1) % step:
        return family.dense(config)
    config.ignore("intermediate_size")
    count = "num_experts" if config.maybe("num_experts") else "num_local_experts"
    shared = config.count("shared_expert_intermediate_size")
    found = _experts(config, family, count, "moe_intermediate_size", shared)
    chosen = config.maybe("norm_topk_prob")  # Qwen3.5 has none, and always does it
    return replace(found, renormalise=chosen in (None, True), shared_gate=shared > 0)


def mixtral(config: Config, family: Family, number: int) -> Experts:
    return _experts(config, family, "num_local_experts", "intermediate_size")


def olmoe(config: Config, family: Family, number: int) -> Experts:
    found = _experts(config, family, "num_experts", "intermediate_size")
    return replace(found, renormalise=config.flag("norm_topk_prob"))


def granite(config: Config, family: Family, number: int) -> MLP | Experts:
    """Experts beside a shared one, or that one alone."""
    inner = config.count("shared_intermediate_size")
    if not config.maybe("num_local_experts"):
        config.ignore("intermediate_size", "num_experts_per_tok")
        return family.dense(config, inner)
    found = _experts(config, family, "num_local_experts", "intermediate_size", inner)
    return replace(found, scores="softmax of chosen")


def gpt_oss(config: Config, family: Family, number: int) -> Experts:
    alpha, limit = config.maybe("swiglu_alpha"), config.maybe("swiglu_limit")
    if alpha not in (None, 1.702) or limit not in (None, 7.0):
        raise Unknown(f"its activation has {alpha} and {limit}")
    found = _experts(config, family, "num_local_experts", "intermediate_size", router_bias=True)
    each = replace(found.each, activation="clamped", bias=True)
    return replace(found, scores="softmax of chosen", each=each)


def deepseek(config: Config, family: Family, number: int) -> MLP | Experts:
    """Sigmoid scores, a correction that chooses, groups; the first layers have no experts."""
    if isinstance(found := _routed(config, family, number), MLP):
        return found
    groups, kept = config.size("n_group"), config.size("topk_group")
    return replace(found, **_SIGMOID, epsilon=1e-20, groups=groups, kept_groups=kept)


def deepseek_v2(config: Config, family: Family, number: int) -> MLP | Experts:
    """Softmax scores; groups, if any, are chosen by their one best expert."""
    if isinstance(found := _routed(config, family, number), MLP):
        return found
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unknown(f"its topk_method is {method}")
    if method == "greedy":
        config.ignore("n_group", "topk_group")
        return found
    groups, kept = config.size("n_group"), config.size("topk_group")
    return replace(found, groups=groups, kept_groups=kept, group_best=1)


def mistral4(config: Config, family: Family, number: int) -> MLP | Experts:
    """Softmax scores."""
    found = deepseek(config, family, number)
    known: dict[str, Any] = {"scores": "softmax", "correction": False}
    return found if isinstance(found, MLP) else replace(found, **known)


def _routed(config: Config, family: Family, number: int) -> MLP | Experts:
    """Scaled experts beside shared ones; the first layers, or those of a type, have an MLP."""
    routed, always = "n_routed_experts", "n_shared_experts"
    if (types := config.maybe("mlp_layer_types")) is not None:
        dense = types[number] == "dense"
        config.ignore("first_k_dense_replace")
        if config.maybe(routed) is None:  # EXAONE's
            routed, always = "num_experts", "num_shared_experts"
    else:
        dense = number < config.count("first_k_dense_replace")
    if dense:  # as all may be
        config.ignore(routed, always, *_OF_EXPERTS)
        return family.dense(config)
    config.ignore("intermediate_size")
    shared = config.count("moe_shared_expert_intermediate_size")
    shared = shared or config.size("moe_intermediate_size") * config.count(always)
    return _scaled(config, _experts(config, family, routed, "moe_intermediate_size", shared))


def nemotron(config: Config, family: Family, number: int) -> MLP | Experts:
    """A block of its own."""
    if config.get("layers_block_type")[number] == "mlp":
        return family.dense(config)
    found = deepseek(config, family, number)
    if isinstance(found, MLP) or config.maybe("moe_latent_size") is None:
        return found
    if config.flag(family.mlp_bias):
        raise Unknown("its experts are in a latent space with biases")
    return replace(found, latent=config.size("moe_latent_size"))


def minimax(config: Config, family: Family, number: int) -> Experts:
    return _experts(config, family, "num_local_experts", "intermediate_size", **_SIGMOID)


def ernie(config: Config, family: Family, number: int) -> MLP | Experts:
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    if (number + 1) % config.size("moe_layer_interval") or not first <= number <= last:
        return family.dense(config)
    shared = config.size("moe_intermediate_size") * config.count("moe_num_shared_experts")
    found = _experts(config, family, "moe_num_experts", "moe_intermediate_size", shared)
    return replace(found, correction=True)


def lfm2_dense(config: Config, family: Family, number: int) -> MLP:
    inner = config.size("intermediate_size")
    multiple, factor = config.size("block_multiple_of"), config.number("block_ffn_dim_multiplier")
    if config.flag("block_auto_adjust_ff_dim"):
        inner = multiple * -(-int(factor * int(2 * inner / 3)) // multiple)
    return family.dense(config, inner)


def lfm2_moe(config: Config, family: Family, number: int) -> MLP | Experts:
    if number < config.count("num_dense_layers"):
        return family.dense(config)
    found = _experts(config, family, "num_experts", "moe_intermediate_size", scores="sigmoid")
    correction = config.flag("use_expert_bias")
    return replace(_scaled(config, found), correction=correction, epsilon=1e-6)


def _scaled(config: Config, experts: Experts) -> Experts:
    renormalise, scale = config.flag("norm_topk_prob"), config.number("routed_scaling_factor")
    return replace(experts, renormalise=renormalise, scale=scale)


def short_conv(config: Config) -> ShortConv:
    bias = config.flag("conv_bias")
    return ShortConv(config.size("conv_L_cache"), config.size("hidden_size"), bias, bias)


def delta_net(config: Config) -> DeltaNet:
    names = "conv_kernel_dim num_key_heads num_value_heads key_head_dim value_head_dim".split()
    width, keys, heads, key, value = (config.size(f"linear_{name}") for name in names)
    return DeltaNet(width, keys, heads, key, value)


def kimi_delta(config: Config) -> DeltaNet:
    """KDA with latents of the size of a head."""
    known = {"full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size"}
    if unknown := (config.maybe("linear_attn_config") or {}).keys() - known:
        raise Unknown(f"its linear_attn_config has {', '.join(sorted(unknown))}")
    return _kda(config, rank=config.size("linear_head_dim"))


def ling_delta(config: Config) -> DeltaNet:
    """KDA, perhaps with bounded decays."""
    bound = config.number("kda_lower_bound")
    if not config.flag("kda_safe_gate"):
        return _kda(config)
    if not bound < 0:
        raise Unknown(f"its kda_lower_bound is {bound}")
    return _kda(config, bound=bound)


def _kda(config: Config, **more: Any) -> DeltaNet:
    names = ("linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim")
    width, heads, size = (config.size(name) for name in names)
    return DeltaNet(width, heads, heads, size, size, by_channel=True, **more)


def granite_mamba(config: Config) -> Mamba2:
    names = "d_conv n_heads d_head d_state n_groups".split()
    width, heads, value, state, groups = (config.size(f"mamba_{name}") for name in names)
    least, most = config.get("time_step_limit")
    biases = config.flag("mamba_conv_bias"), config.flag("mamba_proj_bias")
    return Mamba2(width, heads, value, state, groups, *biases, float(least), float(most))


def nemotron_mamba(config: Config) -> Mamba2:
    if (activation := config.get("mamba_hidden_act")) != "silu":
        raise Unknown(f"its activation is {activation}")
    names = "conv_kernel mamba_num_heads mamba_head_dim ssm_state_size n_groups".split()
    width, heads, value, state, groups = (config.size(name) for name in names)
    biases, least = (config.flag("use_conv_bias"), config.flag("use_bias")), "time_step_min"
    return Mamba2(width, heads, value, state, groups, *biases, config.number(least))
