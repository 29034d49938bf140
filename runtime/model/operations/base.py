"""The operations of the decoder loop, in plain torch.

A set for other hardware overrides those for which it has kernels; the check at load stays the same.
Nothing here needs a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from radixcache.kernels.attention import AttentionPlan, LayerInputs, LayerPages
from radixcache.kernels.quantized import dense
from radixcache.kernels.recurrence import Recurrence
from radixcache.runtime.model.description import (
    MLP,
    Architecture,
    Attention,
    Experts,
    Layer,
    Weight,
    Weights,
)
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.operations.experts import GroupedExperts, activate
from radixcache.runtime.model.operations.recurrent import RecurrentMixer, StepStates
from radixcache.states import SequenceStates

_MLP_ROWS = 512
"""Rows whose activations between the products of an MLP are held at once."""

Part = tuple[Weight, torch.Tensor | None]
"""A product's [out, in], in any dtype or quantized, and its bias [out]."""


class PlainProduct:
    """x [T, in] to x @ weight.T + bias [T, out], by torch's own call.

    On a CPU without instructions for bfloat16, torch's product in it takes some ten times as long
    as in float32 (measured, AVX2), so weights and sums are float32 there.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._given = weight.dtype
        if weight.is_cpu and weight.dtype == torch.bfloat16 and not _fast_bfloat16():
            weight, bias = weight.float(), None if bias is None else bias.float()
        self.weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self._bias).to(self._given)


@dataclass
class LoadedLayer:
    """A layer's weights in the form of a set of operations.

    Attributes:
        norms: by the names of `Layer.norms`, and those of queries, keys and values.
        qkv: queries, keys and values side by side, then the gates of the output, if it has them.
        recurrent: in place of attention.
        out: the output of attention, or of a recurrent layer.
        gate_up, down: of the MLP; `gated` takes the first.
        experts: in place of an MLP.
        sinks: [heads], or None.
        scale: the factor on the layer's output, or None.
    """

    spec: Layer
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    qkv: Any = None
    recurrent: RecurrentMixer | None = None
    out: Any = None
    gate_up: Any = None
    down: Any = None
    experts: GroupedExperts | None = None
    sinks: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def first_norm(self) -> torch.Tensor | None:
        return self.norms.get("mlp_norm" if self.spec.mixer is None else "input_norm")


class Operations:
    """The operations on the T rows of a step; hidden states are [T, hidden_size].

    Args:
        recur: the recurrence of delta nets and Mamba 2.

    Attributes:
        rounds: not 0 while the products of quantized weights round their rows to 8 bits; None if no
            product can.
    """

    rounds: c_int32 | None = None

    name = f"torch {torch.__version__}"

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, recur: Recurrence | None = None
    ) -> None:
        self.architecture, self._dtype, self._recur = architecture, dtype, recur
        self.layers: list[LoadedLayer] = []
        self.eps = architecture.eps

    def product(self, *parts: Part) -> Any:
        """At load: one product of the rows of all parts."""
        weights = [dense(weight).to(self._dtype) for weight, _ in parts]
        bias = None
        if any(b is not None for _, b in parts):
            bias = torch.cat([
                w.new_zeros(len(w)) if b is None else b.to(self._dtype)
                for w, (_, b) in zip(weights, parts, strict=True)
            ])  # fmt: skip
        return PlainProduct(join(weights), bias)

    def gate_up(self, gate: Part, up: Part) -> Any:
        """At load: the products that `gated` takes."""
        return self.product(gate), self.product(up)

    def experts(self, spec: Experts, weights: Weights) -> GroupedExperts:
        """At load: the experts of a layer with these weights."""
        return GroupedExperts(spec, weights, self._dtype)

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """At load: a norm's weight; float32 if 1 was added to it, which bfloat16 would round."""
        return weight if self.architecture.norm_offset else weight.to(self._dtype)

    def embedding(self, embedding: Weight, head: Weight | None) -> None:
        """At load: the embedding [vocab_size, hidden_size], and the output layer's weight; None if
        it is the embedding."""
        table = dense(embedding).to(self._dtype)
        self.head = self.product((table if head is None else head, None))
        self.table = self.head.weight if head is None else table
        self._eps = torch.tensor(self.eps, device=table.device)

    def layer(self, number: int, weights: Weights) -> None:
        """At load: take the weights of the next layer, by the names of `layer_shapes`."""
        spec = self.architecture.layers[number]
        loaded = LoadedLayer(spec)
        for name in (*spec.norms, "query_norm", "key_norm"):
            if name in weights:
                loaded.norms[name] = self.norm_weight(weights[name])

        def part(name: str) -> Part:
            return weights[name], weights.get(f"{name}.bias")

        if isinstance(mixer := spec.mixer, Attention):
            loaded.qkv = self.product(*map(part, ["q", "k", "v"] + ["q_gate"] * mixer.gated))
            loaded.out = self.product(part("o"))
            if mixer.sinks:
                loaded.sinks = weights["sinks"].to(self._dtype)
            if mixer.value_norm:
                ones = torch.ones(mixer.kind.value_dim, device=self.table.device)
                loaded.norms["value_norm"] = ones.to(self._dtype)
        elif mixer is not None:
            loaded.recurrent = RecurrentMixer(mixer, weights, self.product, self._recur, self.eps)
            loaded.out = self.product(part("o"))
        if isinstance(spec.mlp, MLP):
            up = part("up")
            loaded.gate_up = self.gate_up(part("gate"), up) if spec.mlp.gated else self.product(up)
            loaded.down = self.product(part("down"))
        elif isinstance(spec.mlp, Experts):
            loaded.experts = self.experts(spec.mlp, weights)
        if spec.layer_scale:
            loaded.scale = weights["layer_scale"].to(self._dtype)
        self.layers.append(loaded)

    def loaded(self, last_norm: torch.Tensor) -> None:
        """At load: take the norm before the output layer, once all layers are read."""
        self.last_norm = self.norm_weight(last_norm)

    def run(
        self, pool: KVPool, plan: AttentionPlan, states: Sequence[SequenceStates] = ()
    ) -> torch.Tensor:
        """Logits [R, vocab_size] of a planned step, whose arrays are token ids, positions, logit
        rows, and of a recurrent model those of `slot_arrays`.

        Args:
            states: of a recurrent model, for each sequence of the step; here the arrays have them.
        """
        token_ids, positions, logit_rows, *slots = plan.arrays
        step = StepStates.of(slots, self.architecture.conv_widths) if slots else None
        residual = F.embedding(token_ids, self.table).to(self._dtype)
        if self.architecture.embed_scale != 1:
            residual = residual * self.architecture.embed_scale
        rotations = self.rotations(positions)
        pages = iter(pool.layers)
        next_norms = [layer.first_norm for layer in self.layers[1:]] + [self.last_norm]
        first = self.layers[0].first_norm
        x = residual if first is None else self.norm(residual, first)
        for number, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            spec = layer.spec
            if isinstance(spec.mixer, Attention):
                rotation = None if spec.mixer.rope is None else rotations[spec.mixer.rope]
                y = self.attend(x, rotation, positions, layer, next(pages), plan)
            elif layer.recurrent is not None:
                assert step is not None and pool.states is not None
                y = layer.recurrent(x, pool.states.of_layer[number], step)
            if layer is self.layers[-1]:  # all K/V are written: the rest is for the logits alone
                if spec.mixer is not None:
                    y = y.index_select(0, logit_rows)
                x, residual = x.index_select(0, logit_rows), residual.index_select(0, logit_rows)
                if not len(logit_rows):
                    return x.new_empty(0, self.architecture.vocab_size)
            if spec.mixer is not None:
                y, after = layer.out(y), layer.norms.get("attended_norm")
                norm = next_norm if spec.mlp is None else layer.norms.get("mlp_norm")
                residual, normed = self.join(y, residual, spec, after, norm)
                x = x if spec.parallel else normed
            if spec.mlp is not None:
                y, after = self.mlp(layer, x), layer.norms.get("after_norm")
                residual, x = self.join(y, residual, spec, after, next_norm, layer.scale)
        return self.scaled(self.head(x))

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with the model's factor and softcap."""
        cap = self.architecture.logit_softcap
        if self.architecture.logit_scale != 1:
            logits = logits * self.architecture.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def rotations(self, positions: torch.Tensor) -> list[Any]:
        """Once per step, for each RoPE: the rows' positions [T] in the form that `turn` needs."""
        found = []
        for rope in self.architecture.ropes:
            angles = positions.float()[:, None] * rope.frequencies
            cos, sin = ((t * rope.scale).to(self._dtype) for t in (angles.cos(), angles.sin()))
            found.append((torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]))
        return found

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm or LayerNorm over the last dimension; `F.rms_norm` takes more operations."""
        if self.architecture.centred:
            return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), None, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        if weight.dtype != self._dtype:
            return (x * factor).mul_(weight).to(self._dtype)
        return (x * factor).to(self._dtype).mul_(weight)

    def join(
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
            y = self.norm(y, norm_after)
        if spec.residual_scale != 1:
            y = y * spec.residual_scale
        if scale is None and next_norm is not None:
            return self.add_norm(y, residual, next_norm)
        residual = y.add_(residual)
        if scale is not None:
            residual = residual.mul_(scale)
        return residual, residual if next_norm is None else self.norm(residual, next_norm)

    def add_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = y.add_(residual)
        return residual, self.norm(residual, weight)

    def gated(self, mlp: MLP, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        """The activations [T, inner] between the products of an MLP."""
        if not mlp.gated:
            return activate(mlp.activation, gate_up(x))
        gate, up = gate_up
        return activate(mlp.activation, gate(x), up(x))

    def mlp(self, layer: LoadedLayer, x: torch.Tensor) -> torch.Tensor:
        """The MLP or the experts [T, hidden_size], without residual; many rows go in parts."""
        if layer.experts is not None:
            return layer.experts(x)
        assert isinstance(layer.spec.mlp, MLP)
        if len(x) <= _MLP_ROWS:
            out: torch.Tensor = layer.down(self.gated(layer.spec.mlp, x, layer.gate_up))
            return out
        out = torch.empty_like(x)
        for rows, to in zip(x.split(_MLP_ROWS), out.split(_MLP_ROWS), strict=True):
            to.copy_(layer.down(self.gated(layer.spec.mlp, rows, layer.gate_up)))
        return out

    def turn(
        self, query: torch.Tensor, key: torch.Tensor, rotation: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads, head_dim] with RoPE; they may be overwritten."""
        cos, sin = rotation
        turned, dim = cos.shape[-1], query.shape[-1]
        heads = torch.cat([query, key], 1)
        part = heads[..., :turned]
        rolled = (part * cos).add_(part.roll(turned // 2, -1).mul_(sin))
        if turned < dim:
            rolled = torch.cat([rolled, heads[..., turned:]], -1)
        return rolled[:, : query.shape[1]], rolled[:, query.shape[1] :]

    def head_norms(
        self, layer: LoadedLayer, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads * head_dim], normed each or all heads at once."""
        assert isinstance(layer.spec.mixer, Attention)
        normed = []
        for heads, name in ((query, "query_norm"), (key, "key_norm")):
            if layer.spec.mixer.head_norms == "head":
                heads = heads.unflatten(-1, (-1, layer.spec.mixer.kind.head_dim))
            normed.append(self.norm(heads, layer.norms[name]).flatten(1))
        return normed[0], normed[1]

    def attend(
        self,
        x: torch.Tensor,
        rotation: Any,
        positions: torch.Tensor,
        layer: LoadedLayer,
        pages: LayerPages,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Write K and V of the rows into the pages, and attend.

        Returns:
            [T, query heads * value_dim].
        """
        spec = layer.spec.mixer
        assert isinstance(spec, Attention)
        kind = spec.kind
        keys, values = kind.kv_heads * kind.head_dim, kind.kv_heads * kind.value_dim
        sizes = [kind.query_heads * kind.head_dim, keys, values] + [spec.width] * spec.gated
        query, key, value, *gate = layer.qkv(x).split(sizes, -1)
        if spec.head_norms is not None:
            query, key = self.head_norms(layer, query, key)
        query, key = (t.unflatten(-1, (-1, kind.head_dim)) for t in (query, key))
        value = value.unflatten(-1, (-1, kind.value_dim))
        if spec.value_norm:
            value = self.norm(value, layer.norms["value_norm"])
        if rotation is not None:
            query, key = self.turn(query, key, rotation)
        if spec.query_scaling is not None:
            beta, length = spec.query_scaling
            factor = 1 + beta * torch.log1p(positions.div(length, rounding_mode="floor").float())
            query = query * factor.to(self._dtype)[:, None, None]
        inputs = LayerInputs(query, key, value, pages, kind, layer.sinks)
        out = plan.run(inputs).flatten(1)
        return out.mul_(gate[0].sigmoid()) if gate else out


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors by rows: a view where they are adjacent in memory, else a copy."""
    first, address = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage()
    for part in parts:
        inside = part.untyped_storage() is storage and part.is_contiguous()
        if not inside or part.data_ptr() != address:
            return torch.cat(parts)
        address += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _fast_bfloat16() -> bool:
    """Whether torch uses instructions of this CPU for products in bfloat16."""
    mkldnn = torch.backends.mkldnn.is_available()
    return mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
