"""Norms, RoPE, activations and experts by FlashInfer's kernels, on NVIDIA GPUs.

A layer of a Llama is 10 launches: two norms that add, four products, RoPE, an append, attention, an
activation; norms of heads take two more. For what FlashInfer has no kernel, torch's stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixcache.kernels.backend import ExpertLinear, Heads, Pair, Part
from radixcache.kernels.flashinfer.experts import FusedExperts
from radixcache.kernels.flashinfer.load import load_flashinfer
from radixcache.kernels.spec import MLP, Attention, Experts, Latent, Weights
from radixcache.kernels.torch.operators import TorchBackend
from radixcache.kernels.trial import Trial, first_right

_ACTIVATIONS = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "gelu": "gelu_and_mul"}


class FlashInferBackend(TorchBackend):
    """Kernels overwrite their inputs: rows of queries, keys and residuals change in place."""

    def __init__(self, *of_the_model: Any) -> None:
        flashinfer = load_flashinfer()
        super().__init__(*of_the_model)
        architecture = self.architecture
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
        return self.linear(gate, up)

    def experts(self, spec: Experts, weights: Weights) -> ExpertLinear:
        """By one kernel, which the first layer of each kind tries; else by grouped products."""
        if not self._fuses_experts or not FusedExperts.takes(self.architecture, spec):
            return super().experts(spec, weights)
        made = FusedExperts(spec, weights, self.dtype, self.triton.grouped_product)
        if spec not in self._tried:
            fused = Trial("FlashInfer", lambda: made, FusedExperts.compare)
            if first_right("experts run", fused, otherwise="torch, as grouped products") is None:
                self._fuses_experts = False
                del made, fused  # they hold its weights, which are stacked again
                return super().experts(spec, weights)
            self._tried.add(spec)
        return made

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight - self.architecture.norm_offset).to(self.dtype)

    def rope_positions(self, positions: torch.Tensor) -> list[Any]:
        if positions.ndim == 2:  # of images; the kernel has one position a row
            return super().rope_positions(positions)
        places = positions.long()
        return [(places, table) for table in self._tables]

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        if self.architecture.centred:
            return super().norm(x, weight, eps)
        normed: torch.Tensor = self._rmsnorm(x, weight, self.eps if eps is None else eps)
        return normed

    def add_norm(self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
        if self.architecture.centred:
            return super().add_norm(y, residual, weight)
        self._fused_add_rmsnorm(y, residual, weight, self.eps)
        return residual, y

    def activation(self, mlp: MLP, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        if not mlp.gated:
            return super().activation(mlp, x, gate_up)
        both = gate_up(x)
        if (kernel := _ACTIVATIONS.get(mlp.activation)) is None:
            gate, up = both.chunk(2, -1)
            return super().activation(mlp, x, (lambda _: gate, lambda _: up))
        out = both.new_empty(len(both), both.shape[1] // 2)
        getattr(self._kernels, kernel)(both, out=out)
        return out

    def head_norms(self, spec: Attention, heads: Heads, norms: Mapping[str, torch.Tensor]) -> Heads:
        each = spec.head_norms == "head"
        for x, name in zip(heads, ("query_norm", "key_norm"), strict=False):
            if each:
                x = x.unflatten(-1, (-1, spec.kind.head_dim))
            if each and self.architecture.norm_offset:  # a kernel for two dimensions alone
                x.copy_(self.norm(x.flatten(0, 1), norms[name]).view_as(x))
            else:
                self._rmsnorm(x, norms[name], self.eps, out=x)
        return heads

    def rope(self, heads: Heads, positions: Any) -> Heads:
        (query, *keys), (places, table) = heads, positions
        if places.ndim == 3:  # cosines
            return super().rope(heads, positions)
        key = keys[0] if keys else torch.zeros_like(query[:, :1])  # which the kernel turns, too
        self._kernels.apply_rope_with_cos_sin_cache_inplace(
            places, query.flatten(1), key.flatten(1), query.shape[-1], table
        )
        return heads


@torch.inference_mode()
def probe(backend: FlashInferBackend) -> None:
    """Run each kernel once, which loads or compiles it.

    Raises:
        RuntimeError: a kernel gives wrong results. FlashInfer may raise anything else.
    """
    architecture, device = backend.architecture, backend.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=backend.dtype, device=device)

    hidden = architecture.hidden_size
    norm = zeros(hidden)
    found = [backend.norm(zeros(2, hidden), norm)]
    found += backend.add_norm(zeros(2, hidden), zeros(2, hidden), norm)
    for layer in dict.fromkeys(architecture.layers):
        if isinstance(mlp := layer.mlp, MLP):
            both = zeros(2, mlp.inner * (1 + mlp.gated))
            found.append(backend.activation(mlp, zeros(2, hidden), lambda _, both=both: both))
        if isinstance(spec := layer.mixer, Latent):
            for size in (spec.kind.head_dim, spec.q_rank or spec.kind.head_dim):
                found.append(backend.norm(zeros(2, size), zeros(size), spec.eps))
            if spec.rope is not None:
                query, key = (zeros(2, n, spec.kind.value_dim) for n in (spec.kind.query_heads, 1))
                positions = backend.rope_positions(torch.arange(2, device=device))
                found += backend.rope((query, key), positions[spec.rope])
        elif isinstance(spec, Attention):
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
                backend.head_norms(spec, (query.flatten(1), key.flatten(1)), norms)
            if spec.rope is not None:
                positions = backend.rope_positions(torch.arange(2, device=device))
                backend.rope((query, key), positions[spec.rope])
            found += [query, key]
    if any(tensor.any() for tensor in found):  # copies to the host: a failed launch shows
        raise RuntimeError("its kernels give wrong results")
