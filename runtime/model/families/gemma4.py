"""What Gemma 4's layers have beside what a row of the table says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixcache.kernels.spec import MLP, Attention, Experts, Layer, Unknown
from radixcache.runtime.model.families.config import Config
from radixcache.runtime.model.families.family import Family

BESIDE = {
    "mlp_out_norm": "post_feedforward_layernorm_1", "expert_norm": "pre_feedforward_layernorm_2",
    "expert_out_norm": "post_feedforward_layernorm_2", "router_norm": "router.scale",
}  # fmt: skip
"""The norms of experts beside an MLP, by their names in a checkpoint."""

PER_LAYER = {"per_layer_norm": "post_per_layer_input_norm"}


def heads(config: Config, number: int) -> tuple[int | None, int | None]:
    own = {int(n): of for n, of in (config.maybe("per_layer_config") or {}).items()}
    found = own.get(number, {})
    if found.keys() - {"head_dim", "num_key_value_heads"}:
        raise Unknown(f"its layers differ in {', '.join(sorted(found))}")
    return found.get("num_key_value_heads"), found.get("head_dim")


def adjust(config: Config, family: Family, layers: list[Layer]) -> list[Layer]:
    """Experts beside the MLPs; inputs of each layer; the last layers share the K/V of others."""
    beside, per_layer, absent = None, None, {*BESIDE}
    if config.flag("enable_moe_block"):
        each, absent = family.dense(config, "moe_intermediate_size"), set()
        count, active = config.size("num_experts"), config.size("top_k_experts")
        beside = Experts(count, active, each, each_scale=True)
    if size := config.count("hidden_size_per_layer_input"):
        config.agree("vocab_size_per_layer_input", config.size("vocab_size"))
        per_layer = replace(family.dense(config, size), gated=False)
    else:
        absent = absent | {*PER_LAYER}
    norms = tuple(name for name in layers[0].norms if name not in absent)
    changes: dict[str, Any] = {"norms": norms, "beside": beside, "per_layer": per_layer}
    return [replace(layer, **changes) for layer in _sharing(config, layers)]


def _sharing(config: Config, layers: list[Layer]) -> list[Layer]:
    """The last layers attend over the K/V of the last of their type before them, and may have MLPs
    that are twice as wide."""
    types, count = config.get("layer_types"), config.count("num_kv_shared_layers")
    wide, first = config.flag("use_double_wide_mlp"), len(layers) - count
    owners = dict(zip(types, layers[: max(first, 0)], strict=False))
    for number in range(first, len(layers)):
        layer, owner = layers[number], owners.get(types[number])
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, Attention) and isinstance(mlp, MLP)
        if owner is None or not isinstance(owner.mixer, Attention):
            raise Unknown(f"its {count} last layers share keys that no layer has")
        if owner.mixer.kind != mixer.kind:
            raise Unknown("its layers share keys of other heads")
        mlp = replace(mlp, inner=2 * mlp.inner) if wide else mlp
        layers[number] = replace(layer, mixer=replace(mixer, shares=True), mlp=mlp)
    return layers
