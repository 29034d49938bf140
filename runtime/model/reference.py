"""A forward pass in plain torch and float32, to hold a loaded model against.

It shares the loop and torch's operators with the backend for any device, but nothing of what a load
may get wrong on a machine: no kernel, no packed weight, no rounding, and MLA's keys and values are
expanded, which a loop never does. It runs layer by layer while the weights are read, one sequence
without a cache, and decodes no more of a weight than it uses. Tests show that it computes what
transformers does, for every family; and each load, that the model's kernels compute what it does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from radixcache.kernels.attention import LayerPages, PagedBatch
from radixcache.kernels.backend import ExpertLinear, Linear, Pair, Part, TritonKernels
from radixcache.kernels.quantized import Quantized, dense, dense_rows
from radixcache.kernels.spec import MLP, Architecture, Experts, Latent, Weight, Weights
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.experts import activate, choose
from radixcache.kernels.torch.operators import TorchBackend
from radixcache.kernels.torch.recurrence import recur
from radixcache.runtime.model.layer_loop import Kept, LayerLoop, LoadedLayer, Step
from radixcache.runtime.model.state_pool import StatePool, slot_arrays
from radixcache.runtime.model.weights.sources import ModelWeights
from radixcache.states.recurrent import SequenceStates

_PART = 8192  # rows of a weight


class Shared(NamedTuple):
    """What the layers of a text share: `kept` and `inputs` of `loop.Step`, of all of them."""

    kept: Kept
    inputs: torch.Tensor | None


class _Unpacked(TorchBackend):
    """Linears and experts on weights as they are read."""

    def linear(self, *parts: Part) -> Linear:
        return lambda x: torch.cat([_linear(x, *part) for part in parts], -1)

    def heads_linear(self, weight: Weight, heads: int) -> Any:
        """[heads, out, in], for `_Expanded`."""
        return dense(weight).float().unflatten(0, (heads, -1))

    def experts(self, spec: Experts, weights: Weights) -> ExpertLinear:
        return partial(_experts, spec, weights)


class _Expanded(LayerLoop):
    """MLA with the keys and values of all heads, of one sequence without a cache."""

    def _over_latents(
        self, queries: Pair, keys: Pair, step: Step, layer: LoadedLayer, pages: LayerPages
    ) -> torch.Tensor:
        spec = layer.spec.mixer
        assert isinstance(spec, Latent)
        latent, shared = (x[:, 0] for x in keys)
        key = torch.cat([
            torch.einsum("tr,hrn->thn", latent, layer.k_b),
            shared[:, None].expand(-1, spec.kind.query_heads, -1),
        ], -1)  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", torch.cat(queries, -1), key) * spec.kind.scale
        unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        value = torch.einsum("tr,hvr->thv", latent, layer.v_b)
        return torch.einsum("hqk,khv->qhv", weights, value)


def rounded_logits(
    architecture: Architecture,
    tokens: torch.Tensor,
    weights: ModelWeights,
    dtype: torch.dtype,
    rows: torch.Tensor,
) -> torch.Tensor:
    """[T, n] float32 logits of the n tokens `rows`, with what layers give rounded to `dtype`.

    Their distance from those of `run_layer` alone is that of a loop that rounds nothing else.
    """
    embedding = weights.embedding()
    hidden, shared = embed(architecture, tokens, embedding, weights.per_layer())
    for number in range(len(architecture.layers)):
        hidden = run_layer(architecture, number, hidden, weights.layer(number), shared)
        hidden = hidden.to(dtype).float()
    head = weights.head()
    head = embedding if head is None else head
    return logits(architecture, hidden, weights.last_norm(), dense_rows(head, rows))


def embed(
    architecture: Architecture, tokens: torch.Tensor, embedding: Weight, per_layer: Weights
) -> tuple[torch.Tensor, Shared]:
    """[T, hidden_size] float32, and what layers read beside it.

    Args:
        per_layer: the weights of `per_layer_shapes`.
    """
    rows, inputs = dense_rows(embedding, tokens), None
    if per_layer:
        loop = _loop(architecture, tokens.device)
        loop.per_layer(per_layer)
        inputs = loop.layer_inputs(tokens, rows)
    return rows * architecture.embed_scale, Shared({}, inputs)


def logits(
    architecture: Architecture, hidden: torch.Tensor, last_norm: torch.Tensor, head: Weight
) -> torch.Tensor:
    """[T, n] float32, by the lm_head's weights [n, hidden_size] of some or all tokens."""
    loop = _loop(architecture, hidden.device)
    return loop.softcap_logits(product(loop.norm(hidden, last_norm), head))


def run_layer(
    architecture: Architecture, number: int, hidden: torch.Tensor, weights: Weights, shared: Shared
) -> torch.Tensor:
    """[T, hidden_size] float32 after a layer, by the weights of `layer_shapes`."""
    one = replace(architecture, layers=(architecture.layers[number],))
    loop, device, count = _loop(one, hidden.device), hidden.device, len(hidden)
    loop.layer(0, weights)
    batch = PagedBatch.of([np.zeros(1, np.int32)], [count], [count], count)
    states = [SequenceStates(-1, 0)] if one.is_recurrent else []
    arrays = (states and slot_arrays(batch, states)) or []
    rows = np.arange(count)
    plan = TorchAttention(device).plan(batch, rows, rows, rows, *arrays)
    memory: Any = None
    for kind in one.kinds:
        shapes = [(1, count, kind.kv_heads, dim) for dim in (kind.head_dim, kind.value_dim)]
        memory = LayerPages(*(torch.zeros(shape, device=device) for shape in shapes))
    if states:
        memory = StatePool(one.state_shapes, 1, device).of_layer[0]
    x = loop.first_norm(hidden)
    inputs = None if shared.inputs is None else shared.inputs[:, number : number + 1]
    step = loop.begin(plan)._replace(kept=shared.kept, inputs=inputs)
    return loop.run_layer(0, x, hidden.clone(), step, memory, None)[0]


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[T, out]; in parts, so that a head of 128,000 rows is never held whole in float32."""
    if isinstance(weight, Quantized):
        at = torch.arange(weight.shape[0], device=x.device).split(_PART)
        parts = (weight.rows(numbers).dense() for numbers in at)
    else:
        parts = (part.float() for part in weight.split(_PART))
    return torch.cat([x @ part.T for part in parts], 1)


def _loop(architecture: Architecture, device: torch.device) -> LayerLoop:
    attention, triton = TorchAttention(device), TritonKernels(recur)
    return _Expanded(_Unpacked(architecture, torch.float32, device, attention, triton))


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    out = product(x, weight)
    return out if bias is None else out + bias.float()


def _experts(
    spec: Experts, w: Weights, x: torch.Tensor, routed: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, hidden_size], expert by expert; routers are never rounded."""
    read = x if routed is None else routed
    scores = F.linear(read, dense(w["router"]).float(), w.get("router.bias"))
    factors, chosen = choose(spec, scores, w.get("correction"), w.get("expert_scale"))
    rows_in = x if spec.latent is None else product(x, w["latent_in"])
    out = torch.zeros_like(rows_in)
    for number in chosen.unique().tolist():
        rows, place = (chosen == number).nonzero(as_tuple=True)
        own = {name[8:]: each[number] for name, each in w.items() if name.startswith("experts.")}
        out[rows] += factors[rows, place, None] * _mlp(spec.each, rows_in[rows], own)
    if spec.latent is not None:
        out = product(out, w["latent_out"])
    if spec.shared is None:
        return out
    shared = _mlp(spec.shared, x, {n[7:]: t for n, t in w.items() if n.startswith("shared.")})
    return out + (
        shared * F.linear(x, dense(w["shared.router"]).float()).sigmoid()
        if spec.shared_gate
        else shared
    )


def _mlp(mlp: MLP, x: torch.Tensor, w: Weights) -> torch.Tensor:
    names = ["gate", "up"] if mlp.gated else ["up"]
    inner = [_linear(x, w[name], w.get(f"{name}.bias")) for name in names]
    return _linear(activate(mlp.activation, *inner), w["down"], w.get("down.bias"))
