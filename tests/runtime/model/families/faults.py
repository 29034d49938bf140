"""Descriptions and weights of a family with a fault, which its logits must show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from radixcache.kernels.spec import (
    ATTENDS,
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Latent,
    Layer,
    Weights,
)
from radixcache.runtime.model.families.gemma4 import BESIDE
from radixcache.runtime.model.weights.plan import halves


def swap_norms(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    around = ("input_norm", "attended_norm", "mlp_norm", "after_norm")
    names = [name for name in around if name in weights]
    for name, norm in zip(names, [weights[name] for name in reversed(names)], strict=True):
        weights[name] = norm


def flip_heads(
    weights: Weights, attention: ATTENDS | None, turned: int, names: Sequence[str] = ("q", "q_b")
) -> None:
    if attention is None:
        return
    for name in weights.keys() & {*names}:
        heads = weights[name].unflatten(0, (attention.kind.query_heads, -1))
        weights[name] = heads.flip(0).flatten(0, 1)


def flip_latents(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    if "latent_in" in weights:
        weights["latent_in"] = weights["latent_in"].flip(0)


def one_decay(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    """The first channel's of each head, as in a gated delta net."""
    for name in weights.keys() & {"a", "a_b", "rate_bias"}:
        heads = weights[name].unflatten(0, (len(weights["rate"]), -1))
        weights[name] = heads[:, :1].expand_as(heads).flatten(0, 1)


def growing(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    """States whose decays have the other sign."""
    if "rate" in weights:
        weights["rate"] = weights["rate"] * -1


def swap_convs(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    """Queries and keys go through each other's."""
    if "conv" in weights:
        query, key, value = weights["conv"].chunk(3, 1)
        weights["conv"] = torch.cat([key, query, value], 1)


def flip_router(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    if "router" in weights:
        weights["router"] = weights["router"].flip(0)


def absent(*names: str) -> Any:
    """These weights of a layer change nothing."""

    def change(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
        weights.update({name: torch.ones_like(weights[name]) for name in names if name in weights})

    return change


def roll_inputs(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    """Each layer gets the inputs of the one before."""
    for name, dim in (("table", 1), ("projection", 0)):
        if name in weights:
            weights[name] = weights[name].roll(len(weights["norm"]), dim)


def double_tokens(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    if "table" in weights:
        weights["table"] = 2 * weights["table"]


def interleave(weights: Weights, attention: ATTENDS | None, turned: int) -> None:
    if isinstance(attention, Latent):
        sizes = {"q": attention.nope, "q_b": attention.nope, "kv_a": attention.kind.head_dim}
        for name in weights.keys() & sizes:
            dim = sizes[name] + turned
            order = halves(len(weights[name]) // dim, dim, turned, sizes[name])
            weights[name] = weights[name][order]
    elif attention is not None and turned:
        for name in {*"qk"} & weights.keys():
            dim = attention.kind.head_dim
            weights[name] = weights[name][halves(len(weights[name]) // dim, dim, turned)]


def without_last_owner(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Layers that share keys take those of the owner before the last, whose kind is another."""
    mixers = [(n, x.mixer) for n, x in enumerate(layers) if isinstance(x.mixer, Attention)]
    owner, mixer = [own for own in mixers if own[1].kind.window and not own[1].shares][-1]
    other = replace(mixer, kind=mixer.kind._replace(scale=mixer.kind.scale * (1 + 1e-12)))
    return (*layers[:owner], replace(layers[owner], mixer=other), *layers[owner + 1 :])


def faults(right: Architecture) -> Iterator[tuple[str, Architecture, Any]]:
    """Descriptions, and changes of a layer's weights, with a fault that the logits must show."""
    if any(len(layer.norms) > 1 for layer in right.layers):
        yield "norms", right, swap_norms
    if right.kinds:
        yield "heads", right, flip_heads
    if any(layer.experts for layer in right.layers):
        yield "router", right, flip_router
    if any(layer.experts and layer.experts.latent for layer in right.layers):
        yield "latents", right, flip_latents
    if any(layer.beside for layer in right.layers):
        for name in (*BESIDE, "expert_scale", "layer_scale"):
            yield f"{name} is absent", right, absent(name)
    if right.ropes:
        yield "pairs", right, interleave
        ropes = tuple(replace(rope, frequencies=rope.frequencies**1.02) for rope in right.ropes)
        yield "base", replace(right, ropes=ropes), None
    if right.per_layer_shapes:
        yield "inputs", right, roll_inputs
        yield "scale of tokens", right, double_tokens
        yield "norm of inputs", right, absent("norm")
        yield "norm behind inputs", right, absent("per_layer_norm")
    if any(layer.shares_kv for layer in right.layers):
        yield "owner", replace(right, layers=without_last_owner(right.layers)), None
    layers = []
    for layer in right.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.kind.window is not None:
            mixer = replace(mixer, kind=mixer.kind._replace(window=mixer.kind.window + 1))
        layers.append(replace(layer, mixer=mixer))
    if tuple(layers) != right.layers:
        yield "windows", replace(right, layers=tuple(layers)), None
    if any(isinstance(layer.mixer, Latent) for layer in right.layers):
        yield from latent_faults(right)
    if any(isinstance(layer.mixer, DeltaNet) and layer.mixer.by_channel for layer in right.layers):
        yield from kda_faults(right)


def latent_faults(right: Architecture) -> Iterator[tuple[str, Architecture, Any]]:
    """Those of MLA: what is absorbed, the scale, and what chooses groups of experts."""

    for name in ("k_b", "v_b", *["z"] * (right.family == "bailing_hybrid")):
        yield name, right, partial(flip_heads, names=(name,))
    yield change(right, Latent, lambda x: {"kind": x.kind._replace(scale=x.kind.scale * 1.05)})
    yield change(right, Latent, lambda x: {"eps": 1e-2})
    if right.family == "mistral4":
        yield change(right, Latent, lambda x: {"query_scaling": None})
    if right.family != "youtu":
        yield change(right, Experts, lambda x: {"group_best": 3 - x.group_best})
        yield change(right, Experts, lambda x: {"scale": x.scale * 1.05})


def kda_faults(right: Architecture) -> Iterator[tuple[str, Architecture, Any]]:
    for fault in (one_decay, growing, swap_convs):
        yield fault.__name__, right, fault
    if right.family == "bailing_hybrid":
        yield change(right, DeltaNet, lambda x: {"bound": x.bound * 1.05})
        yield change(right, DeltaNet, lambda x: {"bound": None})


def change(right: Architecture, of: type, edit: Any) -> tuple[str, Architecture, Any]:
    """Other fields of the parts of a type."""

    def edited(part: Any) -> Any:
        fields: dict[str, Any] = edit(part) if isinstance(part, of) else {}
        return replace(part, **fields) if fields else part

    layers = (replace(x, mixer=edited(x.mixer), mlp=edited(x.mlp)) for x in right.layers)
    return of.__name__, replace(right, layers=tuple(layers)), None
