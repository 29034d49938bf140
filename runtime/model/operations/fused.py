"""The decoder loop's operations with FlashInfer's fused kernels, on NVIDIA GPUs.

A layer of a Llama is 10 launches: two norms that add, four products, RoPE, an append, attention, an
activation; Qwen3 normalises heads with two more. Attention is `kernels/flashinfer_backend.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from radixcache.kernels.load_flashinfer import load_flashinfer
from radixcache.runtime.model.architecture import Architecture
from radixcache.runtime.model.operations.base import Layer, Operations, Weight


class FusedOperations(Operations):
    """Kernels overwrite their inputs: rows of queries, keys and residuals change in place."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        flashinfer = load_flashinfer()
        super().__init__(architecture, dtype)
        self._kernels: Any = flashinfer
        self.name = f"FlashInfer {flashinfer.__version__}"
        at = torch.arange(architecture.max_context, device=self._frequencies.device)
        angles = at[:, None] * self._frequencies
        table = torch.cat([angles.cos(), angles.sin()], -1)  # float32, as the kernel wants it
        self._table = table.mul_(architecture.rope_scale)

    def gate_up(self, gate: Weight, up: Weight) -> Any:
        return self.product(gate, up)

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.long()

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._kernels.rmsnorm(x, weight, self.eps)
        return normed

    def project(
        self,
        x: torch.Tensor,
        product: Callable[[torch.Tensor], torch.Tensor],
        residual: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = product(x)
        self._kernels.fused_add_rmsnorm(x, residual, norm, self.eps)
        return residual, x

    def gated(self, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        both = gate_up(x)
        out = both.new_empty(len(both), both.shape[1] // 2)
        self._kernels.silu_and_mul(both, out=out)
        return out

    def mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer.down(self.gated(x, layer.gate_up))
        return out

    def turn(
        self, qkv: torch.Tensor, rotation: Any, layer: Layer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, turned = layer.kind.query_heads, layer.kind.query_heads + layer.kind.kv_heads
        query, key = qkv[:, :queries], qkv[:, queries:turned]
        for heads, norm in ((query, layer.query_norm), (key, layer.key_norm)):
            if norm is not None:
                self._kernels.rmsnorm(heads, norm, self.eps, out=heads)
        dim = layer.kind.head_dim
        flat = qkv.flatten(1)
        self._kernels.apply_rope_with_cos_sin_cache_inplace(
            rotation, flat[:, : queries * dim], flat[:, queries * dim : turned * dim], dim,
            self._table,
        )  # fmt: skip
        return query, key


@torch.inference_mode()
def tried(architecture: Architecture, dtype: torch.dtype) -> FusedOperations:
    """The operations after each kernel has run once, which loads or compiles it."""
    operations = FusedOperations(architecture, dtype)
    kind, device = architecture.kinds[0], architecture.inverse_frequencies.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    hidden, heads = architecture.hidden_size, kind.query_heads + kind.kv_heads
    inner, norm = zeros(2 * architecture.intermediate_size, hidden), zeros(hidden)
    layer = Layer(
        kind=kind,
        qkv=operations.product((inner, None)),
        query_norm=zeros(kind.head_dim),
        key_norm=zeros(kind.head_dim),
        out=operations.product((zeros(hidden, hidden), None)),
        mlp_norm=norm,
        gate_up=operations.product((inner, None)),
        down=operations.product((zeros(hidden, architecture.intermediate_size), None)),
        norm_after=norm,
    )
    x = operations.norm(zeros(2, hidden), norm)
    qkv = zeros(2, heads + kind.kv_heads, kind.head_dim)
    places = torch.arange(2, device=device)
    query, key = operations.turn(qkv, operations.rotation(places), layer)
    residual, x = operations.project(x, layer.out, zeros(2, hidden), norm)
    x = operations.gated(x, layer.gate_up)
    if any(t.any() for t in (query, key, residual, x)):  # copies to the host: a failed launch shows
        raise RuntimeError("its kernels give wrong results")
    return operations
