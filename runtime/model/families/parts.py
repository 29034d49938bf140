"""Experts and recurrent layers of families, from their settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixcache.runtime.model.description import (
    MLP,
    DeltaNet,
    Experts,
    Mamba2,
    ShortConv,
    Unknown,
)
from radixcache.runtime.model.families.config import Config
from radixcache.runtime.model.families.family import Family


def experts(
    config: Config,
    family: Family,
    inner: str = "moe_intermediate_size",
    count: str = "num_experts",
    active: str = "num_experts_per_tok",
    shared: int = 0,
    **more: Any,
) -> Experts:
    """Experts of these settings, and a shared one of this size; `more` are fields of `Experts`."""
    one = family.dense(config, shared) if shared else None
    each = replace(family.dense(config, inner), bias=False)
    return Experts(config.size(count), config.size(active), each, shared=one, **more)


def qwen(config: Config, family: Family, number: int) -> MLP | Experts:
    """Experts in every n-th layer; one is shared and gated, if the config has one."""
    step, dense = config.maybe("decoder_sparse_step") or 1, config.maybe("mlp_only_layers") or []
    if number in dense or (number + 1) % step:
        return family.dense(config)
    config.ignore("intermediate_size")
    shared = config.count("shared_expert_intermediate_size")
    renormalise = config.maybe("norm_topk_prob")  # Qwen3.5 has none, and always does
    return experts(
        config,
        family,
        count="num_experts" if config.maybe("num_experts") else "num_local_experts",
        renormalise=renormalise is None or bool(renormalise),
        shared=shared,
        shared_gate=shared > 0,
    )


def mixtral(config: Config, family: Family, number: int) -> Experts:
    return experts(config, family, "intermediate_size", "num_local_experts")


def olmoe(config: Config, family: Family, number: int) -> Experts:
    renormalise = config.flag("norm_topk_prob")
    return experts(config, family, "intermediate_size", renormalise=renormalise)


def granite(config: Config, family: Family, number: int) -> MLP | Experts:
    """Experts beside a shared one, or that one alone."""
    inner = config.count("shared_intermediate_size")
    if not config.maybe("num_local_experts"):
        config.ignore("intermediate_size", "num_experts_per_tok")
        return family.dense(config, inner)
    found = experts(config, family, "intermediate_size", "num_local_experts", shared=inner)
    return replace(found, scores="softmax of chosen")


def gpt_oss(config: Config, family: Family, number: int) -> Experts:
    alpha, limit = config.maybe("swiglu_alpha"), config.maybe("swiglu_limit")
    if alpha not in (None, 1.702) or limit not in (None, 7.0):
        raise Unknown(f"its activation has {alpha} and {limit}")
    quantised = config.maybe("quantization_config")
    if quantised is not None and quantised.get("quant_method") != "mxfp4":
        raise Unknown("its weights are quantised in another way than MXFP4")
    found = experts(
        config,
        family,
        "intermediate_size",
        "num_local_experts",
        scores="softmax of chosen",
        router_bias=True,
    )
    return replace(found, each=replace(found.each, activation="clamped", bias=True))


def deepseek(config: Config, family: Family, number: int) -> MLP | Experts:
    """Sigmoid scores, a correction that chooses, groups; the first layers have no experts."""
    if number < config.count("first_k_dense_replace"):
        return family.dense(config)
    config.ignore("intermediate_size")
    inner = config.size("moe_intermediate_size")
    return experts(
        config,
        family,
        count="n_routed_experts",
        scores="sigmoid",
        correction=True,
        renormalise=config.flag("norm_topk_prob"),
        epsilon=1e-20,
        scale=config.number("routed_scaling_factor"),
        groups=config.size("n_group"),
        kept_groups=config.size("topk_group"),
        shared=config.count("moe_shared_expert_intermediate_size")
        or inner * config.count("n_shared_experts"),
    )


def nemotron(config: Config, family: Family, number: int) -> MLP | Experts:
    """A block of its own: an MLP or experts."""
    if config.get("layers_block_type")[number] == "mlp":
        return family.dense(config)
    if config.maybe("moe_latent_size") is not None:
        raise Unknown("its experts are in a latent space")
    config.ignore("n_shared_experts")
    return deepseek(config, family, number)


def minimax(config: Config, family: Family, number: int) -> Experts:
    return experts(
        config,
        family,
        "intermediate_size",
        "num_local_experts",
        scores="sigmoid",
        correction=True,
    )


def ernie(config: Config, family: Family, number: int) -> MLP | Experts:
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    step = config.size("moe_layer_interval")
    if (number + 1) % step or not first <= number <= (len(range(10**6)) if last == -1 else last):
        return family.dense(config)
    inner = config.size("moe_intermediate_size")
    shared = inner * config.count("moe_num_shared_experts")
    found = experts(config, family, count="moe_num_experts", active="moe_k", shared=shared)
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
    return experts(
        config,
        family,
        scores="sigmoid",
        correction=config.flag("use_expert_bias"),
        renormalise=config.flag("norm_topk_prob"),
        epsilon=1e-6,
        scale=config.number("routed_scaling_factor"),
    )


def short_conv(config: Config) -> ShortConv:
    bias = config.flag("conv_bias")
    return ShortConv(config.size("conv_L_cache"), config.size("hidden_size"), bias, bias)


def delta_net(config: Config) -> DeltaNet:
    return DeltaNet(
        config.size("linear_conv_kernel_dim"),
        config.size("linear_num_key_heads"),
        config.size("linear_num_value_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
    )


def granite_mamba(config: Config) -> Mamba2:
    config.ignore("mamba_expand", "mamba_chunk_size")
    least, most = config.get("time_step_limit")
    return Mamba2(
        config.size("mamba_d_conv"),
        config.size("mamba_n_heads"),
        config.size("mamba_d_head"),
        config.size("mamba_d_state"),
        config.size("mamba_n_groups"),
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
        least=float(least),
        most=float(most),
    )


def nemotron_mamba(config: Config) -> Mamba2:
    groups = config.size("n_groups")
    if config.get("mamba_hidden_act") != "silu":
        raise Unknown(f"its activation is {config.get('mamba_hidden_act')}")
    return Mamba2(
        config.size("conv_kernel"),
        config.size("mamba_num_heads"),
        config.size("mamba_head_dim"),
        config.size("ssm_state_size"),
        groups,
        groups,
        config.flag("use_conv_bias"),
        config.flag("use_bias"),
        config.number("time_step_min"),
    )
