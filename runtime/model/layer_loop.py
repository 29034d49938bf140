"""The loop over a model's layers, by the kernels of any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from radixcache.kernels.attention import AttentionPlan, LayerInputs, LayerKind, LayerPages
from radixcache.kernels.backend import (
    Backend,
    ExpertLinear,
    Heads,
    ImageRows,
    Layers,
    Mixer,
    Pair,
    Part,
    Pool,
    SlotUse,
)
from radixcache.kernels.quantized import Quantized, dense, dense_rows
from radixcache.kernels.recurrence import StepStates
from radixcache.kernels.spec import ATTENDS, MLP, Attention, Latent, Layer, Weight, Weights

_ABSORBED = ("k_b", "v_b")
_MLP_ROWS = 512
"""Rows whose activations between the linears of an MLP are held at once."""


@dataclass
class LoadedLayer:
    """A layer's weights in the form of a backend.

    Attributes:
        norms: by the names of `Layer.norms`, and those of queries, keys, values and latents.
        qkv: queries, keys and values side by side, then the gates of the output, if it has them;
            no keys and values in a layer that shares those of another. Of MLA, the queries or their
            latent, the latent and the shared key, then the gates of heads.
        q_b, k_b, v_b: of MLA.
        recurrent: in place of attention.
        out: the output of attention, or of a recurrent layer.
        gate_up, down: of the MLP; `Backend.activation` takes the first.
        experts: in place of an MLP, or beside it.
        sinks: [heads], or None.
        scale: the factor on the layer's output, or None.
        input_up, input_down: of `Layer.per_layer`.
    """

    spec: Layer
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    qkv: Any = None
    q_b: Any = None
    k_b: Any = None
    v_b: Any = None
    recurrent: Mixer | None = None
    out: Any = None
    gate_up: Any = None
    down: Any = None
    experts: ExpertLinear | None = None
    sinks: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    input_up: Any = None
    input_down: Any = None

    @property
    def first_norm(self) -> torch.Tensor | None:
        return self.norms.get("mlp_norm" if self.spec.mixer is None else "input_norm")


Kept = dict[LayerKind, tuple[torch.Tensor, torch.Tensor, LayerPages]]
"""The last K/V that a step has written of each kind, and the pages that have them."""


class Step(NamedTuple):
    """A planned step.

    Attributes:
        kept: for layers that share K/V.
        inputs: [T, layers, size] of the layers, or None.
        images: of the step, or None.
        positions: [T] of its rows; `rope_positions` in the backend's form, for each RoPE.
        states: where the sequences of a recurrent model have theirs.
    """

    plan: AttentionPlan
    positions: torch.Tensor
    rope_positions: list[Any]
    states: StepStates | None
    kept: Kept
    inputs: torch.Tensor | None = None
    images: ImageRows | None = None


def layers_of(backend: Backend) -> Layers:
    """All layers as one kernel, if the backend has it, else the loop."""
    return backend.whole() or LayerLoop(backend)


class LayerLoop(Layers):
    """The layers of the backend's architecture, one after another."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._spec, self._dtype = backend, backend.architecture, backend.dtype
        self._layers: list[LoadedLayer] = []

    def embedding(self, embedding: Weight, head: Weight | None) -> None:
        if isinstance(embedding, Quantized):
            self._backend.weights_by.add("dense embedding")
        table = dense(embedding).to(self._dtype)
        head_linear: Any = self._backend.linear((table if head is None else head, None))
        self._lm_head, self._table = head_linear, head_linear.weight if head is None else table

    def per_layer(self, weights: Weights) -> None:
        self._input_table = weights["table"]
        self._projection = self._backend.linear((weights["projection"], None))
        self._input_norm = self._backend.norm_weight(weights["norm"])

    def layer(self, number: int, weights: Weights) -> None:
        backend, spec = self._backend, self._spec.layers[number]
        loaded = LoadedLayer(spec)
        for name in (*spec.norms, "query_norm", "key_norm", "q_a_norm", "kv_a_norm"):
            if name in weights:
                loaded.norms[name] = backend.norm_weight(weights[name])

        def part(name: str) -> Part:
            return weights[name], weights.get(f"{name}.bias")

        if isinstance(mixer := spec.mixer, Attention):
            names = ["q"] + ["k", "v"] * (not mixer.shares) + ["q_gate"] * mixer.gated
            loaded.qkv = backend.linear(*map(part, names))
            loaded.out = backend.linear(part("o"))
            if mixer.sinks:
                loaded.sinks = weights["sinks"].to(self._dtype)
            if mixer.value_norm:
                ones = torch.ones(mixer.kind.value_dim, device=backend.device)
                loaded.norms["value_norm"] = ones.to(self._dtype)
        elif isinstance(mixer, Latent):
            heads, whole = mixer.kind.query_heads, mixer.q_rank is None
            names = ["q" if whole else "q_a", "kv_a"] + ["z"] * mixer.gated
            loaded.qkv = backend.linear(*map(part, names))
            loaded.q_b = None if whole else backend.linear(part("q_b"))
            loaded.k_b, loaded.v_b = (backend.heads_linear(weights[n], heads) for n in _ABSORBED)
            loaded.out = backend.linear(part("o"))
        elif mixer is not None:
            loaded.recurrent = backend.mixer(mixer, weights)
            loaded.out = backend.linear(part("o"))
        if isinstance(spec.mlp, MLP):
            up = part("up")
            loaded.gate_up = (
                backend.gate_up(part("gate"), up) if spec.mlp.gated else backend.linear(up)
            )
            loaded.down = backend.linear(part("down"))
        if spec.experts is not None:
            if isinstance(weights["experts.up"][0], Quantized):
                backend.weights_by.add("dense experts")
            loaded.experts = backend.experts(spec.experts, weights)
        if spec.per_layer is not None:
            loaded.input_up = backend.linear(part("per_layer.up"))
            loaded.input_down = backend.linear(part("per_layer.down"))
        if spec.layer_scale:
            loaded.scale = weights["layer_scale"].to(self._dtype)
        self._layers.append(loaded)

    def loaded(self, last_norm: torch.Tensor) -> None:
        self._last_norm = self._backend.norm_weight(last_norm)

    def run(
        self,
        pool: Pool,
        plan: AttentionPlan,
        states: Sequence[SlotUse] = (),
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        spec, (token_ids, _, logit_rows, *_) = self._spec, plan.arrays
        residual, inputs = F.embedding(token_ids, self._table).to(self._dtype), None
        if spec.per_layer_shapes:
            if images is not None:
                unscaled = images.embeddings / spec.embed_scale
                residual.index_copy_(0, images.rows, unscaled.to(self._dtype))
            inputs = self.layer_inputs(token_ids, residual)
        if spec.embed_scale != 1:
            residual = residual * spec.embed_scale
        if images is not None:
            residual.index_copy_(0, images.rows, images.embeddings.to(self._dtype))
        step, pages, last = self.begin(plan, images), iter(pool.layers), len(self._layers) - 1
        step = step._replace(inputs=inputs)
        x = self.first_norm(residual)
        for number, layer in enumerate(self._layers):
            of_layer: Any = None
            if isinstance(layer.spec.mixer, ATTENDS):
                of_layer = None if layer.spec.shares_kv else next(pages)
            elif layer.recurrent is not None:
                of_layer = pool.states.of_layer[number]
            rows = logit_rows if number == last else None
            following = self._last_norm if number == last else self._layers[number + 1].first_norm
            residual, x = self.run_layer(number, x, residual, step, of_layer, following, rows)
        if pooled is not None:
            x, rows = x.split([len(x) - len(pooled), len(pooled)])
            pooled.copy_(rows)
        return self.softcap_logits(self._lm_head(x)) if len(x) else x.new_empty(0, spec.vocab_size)

    def begin(self, plan: AttentionPlan, images: ImageRows | None = None) -> Step:
        """What all layers of a planned step share."""
        _, positions, _, *slots = plan.arrays
        states = StepStates.of(slots, self._spec.conv_widths) if slots else None
        places = positions if images is None or images.positions is None else images.positions
        rope_positions = self._backend.rope_positions(places)
        return Step(plan, positions, rope_positions, states, {}, images=images)

    def layer_inputs(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[T, layers, size], by the tokens and their rows of the embedding."""
        size = len(self._input_norm)
        context = self._projection(rows).unflatten(-1, (-1, size))
        context = self._backend.norm(context, self._input_norm)
        tokens = dense_rows(self._input_table, token_ids).to(self._dtype).view_as(context)
        return context.add_(tokens, alpha=size**0.5).mul_(0.5**0.5)

    def first_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the first layer reads."""
        first = self._layers[0].first_norm
        return hidden if first is None else self._backend.norm(hidden, first)

    def run_layer(
        self,
        number: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        step: Step,
        memory: Any,
        next_norm: torch.Tensor | None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual after a layer, and what the next one reads.

        Args:
            x: what the layer reads: the residual, normed.
            memory: its pages or states; None if it has neither.
            next_norm: of the next layer; None if that reads the residual.
            rows: those that go on after the mixer, once K/V of all are written; None for all.
        """
        layer = self._layers[number]
        mixer, mlp, per_layer = layer.spec.mixer, layer.spec.mlp, layer.spec.per_layer
        if isinstance(mixer, Attention):
            y = self._attend(x, step, layer, memory)
        elif isinstance(mixer, Latent):
            y = self._attend_latents(x, step, layer, memory)
        elif layer.recurrent is not None:
            assert step.states is not None
            y = layer.recurrent(x, memory, step.states)
        if rows is not None:
            if mixer is not None:
                y = y.index_select(0, rows)
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            if not len(rows):
                return residual, x
        if mixer is not None:
            y, after = layer.out(y), layer.norms.get("attended_norm")
            norm = next_norm if mlp is None else layer.norms.get("mlp_norm")
            residual, normed = self._add(y, residual, layer.spec, after, norm)
            x = x if layer.spec.parallel else normed
        if mlp is not None:
            y, after = self._mlp(layer, x), layer.norms.get("after_norm")
            if layer.spec.beside is not None:
                y = self._beside(layer, residual, y)
            if (images := step.images) is not None and number < len(images.deep):
                y.index_add_(0, images.rows, images.deep[number].to(self._dtype))
            ends = (next_norm, layer.scale) if per_layer is None else (None, None)
            residual, x = self._add(y, residual, layer.spec, after, *ends)
        if per_layer is not None:
            assert step.inputs is not None
            inputs = step.inputs[:, number]
            inputs = inputs if rows is None else inputs.index_select(0, rows)
            y = self._backend.activation(per_layer, x, layer.input_up)
            y, after = layer.input_down(y.mul_(inputs)), layer.norms["per_layer_norm"]
            residual, x = self._add(y, residual, layer.spec, after, next_norm, layer.scale)
        return residual, x

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """By a weight as it is read."""
        return self._backend.norm(hidden, self._backend.norm_weight(weight))

    def softcap_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """lm_head's logits with the model's factor, and its softcap: cap * tanh(logits / cap)."""
        cap = self._spec.logit_softcap
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def _add(
        self,
        y: torch.Tensor,
        residual: torch.Tensor,
        spec: Layer,
        norm_after: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual plus a block's result y, and what the next block reads; the old residual
        may be overwritten.

        Args:
            norm_after: the norm of y, if there is one.
            next_norm: the norm of the sum for the next block; None if that reads the sum.
            scale: the factor on the sum, or None.
        """
        if norm_after is not None:
            y = self._backend.norm(y, norm_after)
        if spec.residual_scale != 1:
            y = y * spec.residual_scale
        if scale is None and next_norm is not None:
            return self._backend.add_norm(y, residual, next_norm)
        residual = y.add_(residual)
        if scale is not None:
            residual = residual.mul_(scale)
        return residual, residual if next_norm is None else self._backend.norm(residual, next_norm)

    def _mlp(self, layer: LoadedLayer, x: torch.Tensor) -> torch.Tensor:
        """The MLP or the experts [T, hidden_size], without residual; many rows go in parts."""
        mlp, activation = layer.spec.mlp, self._backend.activation
        if not isinstance(mlp, MLP):
            assert layer.experts is not None
            return layer.experts(x)
        if len(x) <= _MLP_ROWS:
            out: torch.Tensor = layer.down(activation(mlp, x, layer.gate_up))
            return out
        out = torch.empty_like(x)
        for rows, to in zip(x.split(_MLP_ROWS), out.split(_MLP_ROWS), strict=True):
            to.copy_(layer.down(activation(mlp, rows, layer.gate_up)))
        return out

    def _beside(self, layer: LoadedLayer, residual: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The MLP's result y and that of the experts beside it, each normed."""
        assert layer.experts is not None
        norm, norms = self._backend.norm, layer.norms
        rows, routed = (norm(residual, norms[name]) for name in ("expert_norm", "router_norm"))
        found = norm(layer.experts(rows, routed), norms["expert_out_norm"])
        return norm(y, norms["mlp_out_norm"]).add_(found)

    def _attend(
        self,
        x: torch.Tensor,
        step: Step,
        layer: LoadedLayer,
        pages: LayerPages | None,
    ) -> torch.Tensor:
        """Write K and V of the rows into the pages, and attend: [T, query heads * value_dim].

        Without pages, the layer attends over what is kept of its kind.
        """
        backend, spec = self._backend, layer.spec.mixer
        assert isinstance(spec, Attention)
        kind = spec.kind
        own = [kind.kv_heads * kind.head_dim, kind.kv_heads * kind.value_dim] * (not spec.shares)
        sizes = [kind.query_heads * kind.head_dim, *own] + [spec.width] * spec.gated
        query, *others = layer.qkv(x).split(sizes, -1)
        heads: Heads = (query, *others[: len(own) // 2])
        if spec.head_norms is not None:
            heads = backend.head_norms(spec, heads, layer.norms)
        heads = tuple(t.unflatten(-1, (-1, kind.head_dim)) for t in heads)
        if spec.rope is not None:
            heads = backend.rope(heads, step.rope_positions[spec.rope])
        query = heads[0]
        if pages is None:
            key, value, pages = step.kept[kind]
        else:
            key, value = heads[1], others[1].unflatten(-1, (-1, kind.value_dim))
            if spec.value_norm:
                value = backend.norm(value, layer.norms["value_norm"])
            step.kept[kind] = key, value, pages
        query = self._scaled(query, spec, step)
        inputs = LayerInputs(query, key, value, pages, kind, layer.sinks, spec.shares)
        out = step.plan.run(inputs).flatten(1)
        return out.mul_(others[-1].sigmoid()) if spec.gated else out

    def _attend_latents(
        self, x: torch.Tensor, step: Step, layer: LoadedLayer, pages: LayerPages
    ) -> torch.Tensor:
        """`_attend` of MLA: [T, query heads * value]."""
        backend, spec = self._backend, layer.spec.mixer
        assert isinstance(spec, Latent)
        kind, norms = spec.kind, layer.norms
        sizes = [spec.q_rank or spec.query_width, kind.head_dim, kind.value_dim]
        sizes += [kind.query_heads] * spec.gated
        query, latent, key, *gates = layer.qkv(x).split(sizes, -1)
        if layer.q_b is not None:
            query = layer.q_b(backend.norm(query, norms["q_a_norm"], spec.eps))
        query = query.unflatten(-1, (kind.query_heads, -1))
        query, turned = query.split([spec.nope, kind.value_dim], -1)
        latent = backend.norm(latent, norms["kv_a_norm"], spec.eps)[:, None]
        turned, key = turned.contiguous(), key[:, None].contiguous()
        if spec.rope is not None:
            turned, key = backend.rope((turned, key), step.rope_positions[spec.rope])
        query, turned = (self._scaled(part, spec, step) for part in (query, turned))
        out = self._over_latents((query, turned), (latent, key), step, layer, pages)
        for gate in gates:
            out = out.mul(gate.sigmoid()[..., None])
        return out.flatten(1)

    def _over_latents(
        self, queries: Pair, keys: Pair, step: Step, layer: LoadedLayer, pages: LayerPages
    ) -> torch.Tensor:
        """Attention of MLA over latents alone, with `k_b` and `v_b` absorbed: [T, heads, value].

        Args:
            queries: what meets the latents [T, heads, nope], and what is rotated [T, heads, rope].
            keys: the latents [T, 1, rank], and the shared keys [T, 1, rope].
        """
        spec = layer.spec.mixer
        assert isinstance(spec, Latent)
        query = torch.cat([layer.k_b(queries[0]), queries[1]], -1)
        out: torch.Tensor = layer.v_b(step.plan.run(LayerInputs(query, *keys, pages, spec.kind)))
        return out

    def _scaled(self, query: torch.Tensor, spec: ATTENDS, step: Step) -> torch.Tensor:
        """Queries [T, heads, dim] by the factor of their positions."""
        if spec.query_scaling is None:
            return query
        beta, length = spec.query_scaling
        lengths = step.positions.div(length, rounding_mode="floor").float()
        factor = 1 + beta * torch.log1p(lengths)
        return query * factor.to(self._dtype)[:, None, None]
