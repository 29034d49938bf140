"""The decoder loop by the native CPU kernels: all layers of a step are one call."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch

from radixcache.kernels.attention import AttentionPlan
from radixcache.kernels.native.attention import NativeBackend, NativePlan
from radixcache.kernels.native.linear import PackedLinear
from radixcache.kernels.native.model import Linears, NativeLayer, NativeModel
from radixcache.kernels.quantized import Quantized
from radixcache.runtime.model.architecture import Architecture
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.operations.base import Loaded, Operations, Weight, join
from radixcache.runtime.model.system_memory import use_huge_pages


class NativeOperations(Operations):
    """Exact: a row's results depend, to the bit, on that row alone."""

    name = NativeBackend.name

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__(architecture, dtype)
        self._packed: list[PackedLinear] = []

    def product(self, *parts: Weight) -> PackedLinear:
        (packed,) = self._pack(parts)
        return packed

    def qkv(self, *parts: Weight) -> Linears:
        return self._pack(parts)

    def gate_up(self, gate: Weight, up: Weight) -> Linears:
        return self._pack((gate, up))

    def _pack(self, parts: tuple[Weight, ...]) -> Linears:
        """Join parts of one format into one product: threads wait once per product."""
        packed = []
        for _, same in groupby(parts, key=lambda part: _format(part[0])):
            weights, biases = zip(*same, strict=True)
            bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
            packed.append(PackedLinear(_join(list(weights), self._dtype), bias))
        self._packed += packed
        return tuple(packed)

    def embedding(
        self, embedding: torch.Tensor | Quantized, head: torch.Tensor | Quantized | None
    ) -> tuple[PackedLinear, PackedLinear]:
        table = self.product((embedding, None))
        return table, table if head is None else self.product((head, None))

    def loaded(self, weights: Loaded) -> None:
        layers = [NativeLayer(*layer) for layer in weights.layers]
        self._model = NativeModel(
            weights.embedding,
            weights.first_norm,
            layers,
            weights.head,
            self._frequencies,
            self._rope_scale,
            self.eps,
        )
        use_huge_pages(packed.block for packed in self._packed)

    def run(self, pool: KVPool, plan: AttentionPlan) -> torch.Tensor:
        assert isinstance(plan, NativePlan)
        tables = (table.long().contiguous() for table in plan.arrays)
        return self._model.forward(plan, pool.layers, *tables)


def _format(weight: torch.Tensor | Quantized) -> Any:
    return (weight.bits, weight.block) if isinstance(weight, Quantized) else weight.dtype


def _join(weights: list[Any], dtype: torch.dtype) -> torch.Tensor | Quantized:
    """One weight from several of one format, in `dtype` or fewer bits."""
    if isinstance(weights[0], Quantized):
        return Quantized.join(weights)
    joined = join(weights)
    return joined if joined.itemsize <= dtype.itemsize else joined.to(dtype)
