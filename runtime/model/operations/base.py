"""The operations of the decoder loop, in plain torch.

Only this file names them. A set for other hardware overrides those for which it has kernels; the
check at load stays the same. Nothing here needs a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from radixcache.kernels.attention import AttentionPlan, LayerInputs, LayerKind, LayerPages
from radixcache.kernels.quantized import Quantized
from radixcache.runtime.model.architecture import Architecture
from radixcache.runtime.model.kv_pool import KVPool

_MLP_ROWS = 512
"""Rows whose activations between the products of an MLP are held at once."""

Weight = tuple[torch.Tensor | Quantized, torch.Tensor | None]
"""A product's [out, in], in the dtype of the step, in fewer bits or quantized; and its bias."""


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

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)


class Layer(NamedTuple):
    """The weights of one layer, in the form of a set of operations.

    `query_norm` and `key_norm` [head_dim] are those of heads; `norm_after` is the next layer's
    first norm, or the model's last. `Operations` makes the products.
    """

    kind: LayerKind
    qkv: Any
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Any
    mlp_norm: torch.Tensor
    gate_up: Any
    down: Any
    norm_after: torch.Tensor


class Loaded(NamedTuple):
    """All weights of a model; `Operations.embedding` makes embedding and head."""

    embedding: Any
    first_norm: torch.Tensor
    layers: list[Layer]
    head: Any


class Operations:
    """The operations on the T rows of a step; hidden states are [T, hidden_size]."""

    name = f"torch {torch.__version__}"

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._frequencies = architecture.inverse_frequencies
        self._rope_scale = architecture.rope_scale
        self._vocab_size = architecture.vocab_size
        self.eps = architecture.eps
        self._eps = self._frequencies.new_tensor(architecture.eps)

    def product(self, *parts: Weight) -> Any:
        """At load: one product of the rows of all parts."""
        weight = join([_dense(weight).to(self._dtype) for weight, _ in parts])
        bias = None if parts[0][1] is None else join([b for _, b in parts if b is not None])
        return PlainProduct(weight, bias)

    def qkv(self, *parts: Weight) -> Any:
        """At load: the product that gives queries, keys and values side by side."""
        return self.product(*parts)

    def gate_up(self, gate: Weight, up: Weight) -> Any:
        """At load: the products of `gated`."""
        return self.product(gate), self.product(up)

    def embedding(
        self, embedding: torch.Tensor | Quantized, head: torch.Tensor | Quantized | None
    ) -> tuple[Any, Any]:
        """At load: a function from token ids [T] to their rows, and the output layer.

        Args:
            embedding: [vocab_size, hidden_size].
            head: [vocab_size, hidden_size]; None if it is the embedding.
        """
        table = _dense(embedding).to(self._dtype)
        output = self.product((table if head is None else head, None))
        if head is None:
            table = output.weight
        return partial(F.embedding, weight=table), output

    def loaded(self, weights: Loaded) -> None:
        """Take the weights, once all are read."""
        self._weights = weights

    def run(self, pool: KVPool, plan: AttentionPlan) -> torch.Tensor:
        """Logits [R, vocab_size] of a planned step, whose arrays are token ids, positions and logit
        rows."""
        token_ids, positions, logit_rows = plan.arrays
        embedding, first_norm, layers, head = self._weights
        residual = embedding(token_ids).to(self._dtype)
        rotation = self.rotation(positions)
        x = self.norm(residual, first_norm)
        for layer, pages in zip(layers, pool.layers, strict=True):
            x = self.attend(x, rotation, layer, pages, plan)
            if layer is layers[-1]:  # all K/V are written: the rest is for the logits alone
                x, residual = x.index_select(0, logit_rows), residual.index_select(0, logit_rows)
                if not len(logit_rows):
                    return x.new_empty(0, self._vocab_size)
            residual, x = self.project(x, layer.out, residual, layer.mlp_norm)
            residual, x = self.project(x, partial(self.mlp, layer), residual, layer.norm_after)
        logits: torch.Tensor = head(x)
        return logits

    def rotation(self, positions: torch.Tensor) -> Any:
        """Once per step: the rows' positions [T] in the form that `turn` needs."""
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = ((t * self._rope_scale).to(self._dtype) for t in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension; `F.rms_norm` takes more operations."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * factor).to(self._dtype).mul_(weight)

    def project(
        self,
        x: torch.Tensor,
        product: Callable[[torch.Tensor], torch.Tensor],
        residual: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual plus the product of x, and its norm; the old one may be overwritten."""
        residual = product(x).add_(residual)
        return residual, self.norm(residual, norm)

    def gated(self, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        """silu(gate) * up [T, intermediate_size]."""
        gate, up = gate_up
        out: torch.Tensor = up(x).mul_(gate.silu(x))
        return out

    def mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """The gated MLP [T, hidden_size], without residual; many rows go in parts, in place."""
        parts = x.split(_MLP_ROWS)
        if len(parts) == 1:
            out: torch.Tensor = layer.down(self.gated(x, layer.gate_up))
            return out
        for rows in parts:
            rows.copy_(layer.down(self.gated(rows, layer.gate_up)))
        return x

    def turn(
        self, qkv: torch.Tensor, rotation: Any, layer: Layer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads, head_dim] with RoPE, after the norms of heads, if any.

        Args:
            qkv: [T, query heads, then KV heads twice, head_dim]; may be overwritten.
        """
        kind, (cos, sin) = layer.kind, rotation
        heads = qkv[:, : kind.query_heads + kind.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = heads.split((kind.query_heads, kind.kv_heads), 1)
            norms = self.norm(query, layer.query_norm), self.norm(key, layer.key_norm)
            heads = torch.cat(norms, 1)
        turned = (heads * cos).add_(heads.roll(kind.head_dim // 2, -1).mul_(sin))
        return turned[:, : kind.query_heads], turned[:, kind.query_heads :]

    def attend(
        self, x: torch.Tensor, rotation: Any, layer: Layer, pages: LayerPages, plan: AttentionPlan
    ) -> torch.Tensor:
        """Write K and V of the rows into the pages, and attend.

        Returns:
            [T, query heads * head_dim].
        """
        kind = layer.kind
        qkv = layer.qkv(x).unflatten(-1, (-1, kind.head_dim))
        query, key = self.turn(qkv, rotation, layer)
        value = qkv[:, kind.query_heads + kind.kv_heads :]
        return plan.run(LayerInputs(query, key, value, pages, kind)).flatten(1)


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


def _dense(weight: torch.Tensor | Quantized) -> torch.Tensor:
    return weight.dense() if isinstance(weight, Quantized) else weight


def _fast_bfloat16() -> bool:
    """Whether torch uses instructions of this CPU for products in bfloat16."""
    mkldnn = torch.backends.mkldnn.is_available()
    return mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
