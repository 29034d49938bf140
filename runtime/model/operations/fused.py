"""The decoder loop's operations with FlashInfer's fused kernels, on NVIDIA GPUs.

A layer of a Llama is 10 launches: two norms that add, four products, RoPE, an append, attention, an
activation; norms of heads take two more. Attention is `kernels/flashinfer_backend.py`'s. For what
FlashInfer has no kernel, torch's operations stay.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from radixcache.errors import first_line
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.load_flashinfer import load_flashinfer
from radixcache.kernels.recurrence import Recurrence
from radixcache.runtime.model.description import MLP, Architecture, Attention, Experts, Weights
from radixcache.runtime.model.operations.base import LoadedLayer, Operations, Part
from radixcache.runtime.model.operations.experts import GroupedExperts
from radixcache.runtime.model.operations.fused_experts import FusedExperts

_log = logging.getLogger("radixcache")

_ACTIVATIONS = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "gelu": "gelu_and_mul"}


class FusedOperations(Operations):
    """Kernels overwrite their inputs: rows of queries, keys and residuals change in place."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, recur: Recurrence | None
    ) -> None:
        flashinfer = load_flashinfer()
        super().__init__(architecture, dtype, recur)
        self.name = f"FlashInfer {flashinfer.__version__}"
        self._kernels: Any = flashinfer
        offset = "gemma_" if architecture.norm_offset else ""  # the kernel adds 1, in float32
        self._rmsnorm = getattr(flashinfer, f"{offset}rmsnorm")
        self._fused_add_rmsnorm = getattr(flashinfer, f"{offset}fused_add_rmsnorm")
        self._tables = []
        for rope in architecture.ropes:
            at = torch.arange(architecture.max_context, device=rope.frequencies.device)
            angles = at[:, None] * rope.frequencies
            table = torch.cat([angles.cos(), angles.sin()], -1)  # float32, as the kernel wants it
            self._tables.append(table.mul_(rope.scale))
        self._fuses_experts = True
        self._tried: set[Experts] = set()

    def gate_up(self, gate: Part, up: Part) -> Any:
        return self.product(gate, up)

    def experts(self, spec: Experts, weights: Weights) -> GroupedExperts:
        """By one kernel, which the first layer of each kind tries; else by grouped products."""
        if not self._fuses_experts or not FusedExperts.takes(self.architecture, spec):
            return super().experts(spec, weights)
        made = FusedExperts(spec, weights, self._dtype)
        if spec not in self._tried:
            _, errors = first_that_runs(made.compare)
            if errors:
                self._fuses_experts = False
                reason = first_line(errors[0])
                _log.warning("experts run as grouped products: FlashInfer: %s", reason)
                del made, errors  # both hold its weights, which are stacked again
                return super().experts(spec, weights)
            self._tried.add(spec)
        return made

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight - self.architecture.norm_offset).to(self._dtype)

    def rotations(self, positions: torch.Tensor) -> list[Any]:
        places = positions.long()
        return [(places, table) for table in self._tables]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.architecture.centred:
            return super().norm(x, weight)
        normed: torch.Tensor = self._rmsnorm(x, weight, self.eps)
        return normed

    def add_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.architecture.centred:
            return super().add_norm(y, residual, weight)
        self._fused_add_rmsnorm(y, residual, weight, self.eps)
        return residual, y

    def gated(self, mlp: MLP, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        if not mlp.gated:
            return super().gated(mlp, x, gate_up)
        both = gate_up(x)
        if (kernel := _ACTIVATIONS.get(mlp.activation)) is None:
            gate, up = both.chunk(2, -1)
            return super().gated(mlp, x, (lambda _: gate, lambda _: up))
        out = both.new_empty(len(both), both.shape[1] // 2)
        getattr(self._kernels, kernel)(both, out=out)
        return out

    def head_norms(
        self, layer: LoadedLayer, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(layer.spec.mixer, Attention)
        each = layer.spec.mixer.head_norms == "head"
        for heads, name in ((query, "query_norm"), (key, "key_norm")):
            if each:
                heads = heads.unflatten(-1, (-1, layer.spec.mixer.kind.head_dim))
            if each and self.architecture.norm_offset:  # a kernel for two dimensions alone
                heads.copy_(self.norm(heads.flatten(0, 1), layer.norms[name]).view_as(heads))
            else:
                self._rmsnorm(heads, layer.norms[name], self.eps, out=heads)
        return query, key

    def turn(
        self, query: torch.Tensor, key: torch.Tensor, rotation: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places, table = rotation
        self._kernels.apply_rope_with_cos_sin_cache_inplace(
            places, query.flatten(1), key.flatten(1), query.shape[-1], table
        )
        return query, key


@torch.inference_mode()
def tried(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, recur: Recurrence | None
) -> FusedOperations:
    """The operations after each kernel has run once, which loads or compiles it."""
    operations = FusedOperations(architecture, dtype, recur)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    hidden = architecture.hidden_size
    norm = zeros(hidden)
    found = [operations.norm(zeros(2, hidden), norm)]
    for layer in dict.fromkeys(architecture.layers):
        found += operations.join(zeros(2, hidden), zeros(2, hidden), layer, None, norm)
        if isinstance(mlp := layer.mlp, MLP):
            both = zeros(2, mlp.inner * (1 + mlp.gated))
            found.append(operations.gated(mlp, zeros(2, hidden), lambda _, both=both: both))
        if isinstance(spec := layer.mixer, Attention):
            kind = spec.kind
            query, key = (
                zeros(2, kind.query_heads, kind.head_dim),
                zeros(2, kind.kv_heads, kind.head_dim),
            )
            if spec.head_norms is not None:
                each = spec.head_norms == "head"
                norms = {
                    name: zeros(kind.head_dim if each else heads * kind.head_dim)
                    for name, heads in (
                        ("query_norm", kind.query_heads),
                        ("key_norm", kind.kv_heads),
                    )
                }
                operations.head_norms(LoadedLayer(layer, norms), query.flatten(1), key.flatten(1))
            if spec.rope is not None:
                rotations = operations.rotations(torch.arange(2, device=device))
                operations.turn(query, key, rotations[spec.rope])
            found += [query, key]
    if any(tensor.any() for tensor in found):  # copies to the host: a failed launch shows
        raise RuntimeError("its kernels give wrong results")
    return operations
