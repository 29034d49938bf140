"""The decoder loop's operations with the native CPU kernels.

Norms add the residual; RoPE, the KV write and attention are one call. The gated product stays
torch's: oneDNN applies SiLU as it writes, and the kernel for both was nowhere faster (measured).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from radixcache.kernels.native import NativeBackend, SmallProduct, gated, rms_norm
from radixcache.runtime.model.architecture import Architecture
from radixcache.runtime.model.operations import Layer, Operations, Pages, Product


class NativeOperations(Operations):
    """Kernels overwrite their inputs: rows of queries and residuals change in place."""

    name = NativeBackend.name
    native_rows = True

    def __init__(
        self, architecture: Architecture, attention: NativeBackend, dtype: torch.dtype
    ) -> None:
        super().__init__(architecture, attention, dtype)
        self._native = attention
        self._ones = self._frequencies.new_ones(architecture.kinds[0].head_dim, dtype=dtype)

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos() * self._rope_scale, angles.sin() * self._rope_scale

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(x.contiguous(), self._ones if weight is None else weight, self.eps)

    def project(
        self,
        x: torch.Tensor,
        product: Callable[[torch.Tensor], torch.Tensor],
        residual: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, rms_norm(product(x), norm, self.eps, residual=residual)

    def attend(self, x: torch.Tensor, rotation: Any, layer: Layer, pages: Pages) -> torch.Tensor:
        kind = layer.kind
        qkv = layer.qkv(x).unflatten(-1, (-1, kind.head_dim))
        heads = self.heads(qkv, layer)
        out = self._native.run(
            heads[:, : kind.query_heads],
            heads[:, kind.query_heads :],
            qkv[:, kind.query_heads + kind.kv_heads :],
            *pages,
            scale=kind.scale,
            window=kind.window,
            softcap=kind.softcap,
            rope=rotation,
        )
        return out.flatten(1)


class ExactOperations(NativeOperations):
    """Those whose rows have the same bits in any company; if not `same_alone`, of two or more."""

    @property
    def same_alone(self) -> bool:
        return all(product.same_alone for product in self._packed)

    def gated(self, x: torch.Tensor, gate_up: tuple[Product, ...]) -> torch.Tensor:
        gate, up = gate_up  # SiLU by oneDNN, as it writes, has other bits than by our kernel
        return gated(gate(x), up(x), "silu")

    def small_product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        if weight.dtype == torch.float32:
            return SmallProduct(weight, bias)
        return self._pack(weight, bias)
