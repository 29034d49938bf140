"""The operations of the decoder loop, in plain torch.

This is the one place that names them. A set for other hardware overrides those for which it has
kernels; the loop, and the check at load, stay what they are. Nothing here needs a compiler.

A row's result should depend on that row alone, and in `exact` mode does. By default it does not in
`F.linear` of one to three rows, a packed product of one, and a SiLU apart from its product, whose
last elements take other code. Norms and rotations keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.kernels.native import SmallProduct
from radixcache.runtime.model.architecture import Architecture
from radixcache.runtime.model.packed_linear import PackedProduct, PackedRows, packs
from radixcache.runtime.model.system_memory import use_huge_pages

_MLP_ROWS = 512
"""Rows whose activations between the products of an MLP are held at once."""

Pages = tuple[torch.Tensor, torch.Tensor]
Weight = tuple[torch.Tensor, torch.Tensor | None]
"""[out, in] of a product, and its bias [out]."""


class PlainProduct:
    """x [T, in] to x @ weight.T + bias [T, out]: `PackedProduct` by torch's own call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)


Product = PlainProduct | PackedProduct | SmallProduct


class Layer(NamedTuple):
    """The weights of one layer, as a set of operations wants them.

    `head_norms` [query heads + KV heads, head_dim] are those of queries and keys, for each head;
    `norm_after` is the next layer's first norm, or the model's last.
    """

    kind: LayerKind
    qkv: Product
    head_norms: torch.Tensor | None
    out: Product
    mlp_norm: torch.Tensor
    gate_up: tuple[Product, ...]
    down: Product
    norm_after: torch.Tensor


class Operations:
    """What the loop does with the T rows of a step; hidden states are [T, hidden_size]."""

    name = f"torch {torch.__version__}"
    native_rows = False
    """Whether single rows are multiplied by a kernel of their own."""

    def __init__(
        self, architecture: Architecture, attention: AttentionBackend, dtype: torch.dtype
    ) -> None:
        self._attention, self._dtype = attention, dtype
        self._frequencies = architecture.inverse_frequencies
        self._rope_scale = architecture.rope_scale
        self.eps = architecture.eps
        self._eps = self._frequencies.new_tensor(architecture.eps)
        self._packed: list[PackedProduct] = []

    def product(self, *parts: Weight) -> Product:
        """At load: one product of the rows of all parts, which it takes."""
        weight = join([weight for weight, _ in parts])
        bias = None if parts[0][1] is None else join([b for _, b in parts if b is not None])
        if not packs(weight):
            return self.small_product(weight, bias)
        return self._pack(weight, bias)

    def small_product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """At load: one that packing would make slower."""
        return PlainProduct(weight, bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProduct:
        self._packed.append(PackedProduct(weight, bias, row=self.native_rows))
        return self._packed[-1]

    def gate_up(self, gate: Weight, up: Weight) -> tuple[Product, ...]:
        """At load: what `gated` multiplies by."""
        return self.product(gate), self.product(up)

    def lookup(
        self, embedding: torch.Tensor, tied: Product | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """At load: what gives the rows of `embedding` [vocab_size, hidden_size] for token ids [T];
        those that `tied` has of the same weights, where their order is known."""
        if isinstance(tied, PackedProduct):
            with suppress(ValueError):
                return PackedRows(tied, embedding)
        return partial(F.embedding, weight=embedding)

    def loaded(self) -> None:
        """At load, when all products are made."""
        use_huge_pages(product.block for product in self._packed)

    @property
    def same_alone(self) -> bool:
        """Whether one row has the bits that it has among more, by all that is known at load."""
        return False

    def rotation(self, positions: torch.Tensor) -> Any:
        """Once a step: what `turn` needs to know of the rows' positions [T]."""
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = ((t * self._rope_scale).to(self._dtype) for t in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMSNorm over the last dimension; `F.rms_norm` is made of more operations."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        factor = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        normed = (x * factor).to(self._dtype)
        return normed if weight is None else normed.mul_(weight)

    def project(
        self,
        x: torch.Tensor,
        product: Callable[[torch.Tensor], torch.Tensor],
        residual: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual with the product of x added, and its norm; the old one may be lost."""
        residual = product(x).add_(residual)
        return residual, self.norm(residual, norm)

    def gated(self, x: torch.Tensor, gate_up: tuple[Product, ...]) -> torch.Tensor:
        """silu(gate) * up [T, intermediate_size]."""
        gate, up = gate_up
        return up(x).mul_(gate.silu(x))

    def mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """The gated MLP [T, hidden_size], before its residual is added; of many rows
        in parts, in place."""
        parts = x.tensor_split(list(range(_MLP_ROWS, len(x) - 1, _MLP_ROWS)))  # none of one row
        if len(parts) == 1:
            return layer.down(self.gated(x, layer.gate_up))
        for rows in parts:
            rows.copy_(layer.down(self.gated(rows, layer.gate_up)))
        return x

    def heads(self, qkv: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Those of queries and keys of `qkv`, normalised where the model does so."""
        heads = qkv[:, : layer.kind.query_heads + layer.kind.kv_heads]
        if layer.head_norms is None:
            return heads
        return self.norm(heads, None).mul_(layer.head_norms)

    def turn(
        self, qkv: torch.Tensor, rotation: Any, layer: Layer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads, head_dim], normalised where the model does so, with RoPE.

        Args:
            qkv: [T, query heads, then KV heads twice, head_dim]; may be overwritten.
        """
        kind, (cos, sin) = layer.kind, rotation
        heads = self.heads(qkv, layer)
        turned = (heads * cos).add_(heads.roll(kind.head_dim // 2, -1).mul_(sin))
        return turned[:, : kind.query_heads], turned[:, kind.query_heads :]

    def attend(self, x: torch.Tensor, rotation: Any, layer: Layer, pages: Pages) -> torch.Tensor:
        """A layer's attention but for its last product: new K/V go into `pages`.

        Returns:
            [T, query heads * head_dim].
        """
        kind = layer.kind
        qkv = layer.qkv(x).unflatten(-1, (-1, kind.head_dim))
        query, key = self.turn(qkv, rotation, layer)
        value = qkv[:, kind.query_heads + kind.kv_heads :]
        out = self._attention.run(
            query, key, value, *pages, scale=kind.scale, window=kind.window, softcap=kind.softcap
        )
        return out.flatten(1)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """The tensors one below the other: a view where they lie so in memory, else a copy."""
    first, address = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage()
    for part in parts:
        inside = part.untyped_storage() is storage and part.is_contiguous()
        if not inside or part.data_ptr() != address:
            return torch.cat(parts)
        address += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
