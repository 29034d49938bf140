"""Linear, norm, RoPE and activation in plain torch: any device and dtype, without a compiler.

A load is checked against it, in float32; other backends take from it what they have no kernel for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from torch.nn import functional as F

from radixcache.kernels.backend import Backend, ExpertLinear, Heads, Linear, Mixer, Pair, Part
from radixcache.kernels.quantized import Quantized, dense, join_rows
from radixcache.kernels.spec import MLP, RECURRENT, Attention, Experts, Weight, Weights
from radixcache.kernels.torch.experts import GroupedExperts, activate
from radixcache.kernels.torch.recurrence import RecurrentMixer


class TorchLinear:
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


class TorchBackend(Backend):
    """`Backend` in torch's operators. Norms whose weight was added to are float32, which bfloat16
    would round."""

    name = f"torch {torch.__version__}"

    def __init__(self, *of_the_model: Any) -> None:
        super().__init__(*of_the_model)
        self.eps = self.architecture.eps
        self._eps = torch.tensor(self.eps, device=self.device)

    def linear(self, *parts: Part) -> Linear:
        """Quantized weights stay so where Triton multiplies them, those of each format apart."""
        runs = [(form, [*run]) for form, run in groupby(parts, lambda part: self._form(part[0]))]
        if len(runs) > 1:
            products = [self.linear(*run) for _, run in runs]
            return lambda x: torch.cat([product(x) for product in products], -1)
        bias = None
        if any(b is not None for _, b in parts):
            bias = torch.cat([
                torch.zeros(w.shape[0], dtype=self.dtype, device=self.device)
                if b is None else b.to(self.dtype)
                for w, b in parts
            ])  # fmt: skip
        if (form := runs[0][0]) is None:
            return TorchLinear(join_rows([dense(w).to(self.dtype) for w, _ in parts]), bias)
        self.weights_by.add(f"{form[0]}-bit by Triton")
        return self._quantized_linear(Quantized.join([cast(Quantized, w) for w, _ in parts]), bias)

    @cached_property
    def _quantized_linear(self) -> Any:
        return self.triton.find_linear()

    def _form(self, weight: Weight) -> Any:
        """The format of a weight that stays quantized, else None."""
        if not isinstance(weight, Quantized):
            return None
        if self._quantized_linear is not None and self._quantized_linear.takes(weight):
            return weight.format
        self.weights_by.add("dense")
        return None

    def heads_linear(self, weight: Weight, heads: int) -> Linear:
        if isinstance(weight, Quantized):
            self.weights_by.add("dense k_b and v_b")
        each = dense(weight).to(self.dtype).unflatten(0, (heads, -1)).mT
        return lambda x: torch.bmm(x.transpose(0, 1), each).transpose(0, 1)

    def gate_up(self, gate: Part, up: Part) -> Any:
        return self.linear(gate), self.linear(up)

    def experts(self, spec: Experts, weights: Weights) -> ExpertLinear:
        return GroupedExperts(spec, weights, self.dtype, self.triton.grouped_product)

    def mixer(self, spec: RECURRENT, weights: Weights) -> Mixer:
        return RecurrentMixer(spec, weights, self.linear, self.triton.recur, self.eps)

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.architecture.norm_offset else weight.to(self.dtype)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        """`F.rms_norm` takes more operations."""
        if self.architecture.centred:
            eps = self.eps if eps is None else eps
            return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), None, eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        added = self._eps if eps is None else length.new_full((), eps)
        factor = torch.addcmul(added, length, length, value=1 / x.shape[-1]).rsqrt_()
        if weight.dtype != self.dtype:
            return (x * factor).mul_(weight).to(self.dtype)
        return (x * factor).to(self.dtype).mul_(weight)

    def add_norm(self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
        residual = y.add_(residual)
        return residual, self.norm(residual, weight)

    def head_norms(self, spec: Attention, heads: Heads, norms: Mapping[str, torch.Tensor]) -> Heads:
        normed = []
        for x, name in zip(heads, ("query_norm", "key_norm"), strict=False):
            if spec.head_norms == "head":
                x = x.unflatten(-1, (-1, spec.kind.head_dim))
            normed.append(self.norm(x, norms[name]).flatten(1))
        return tuple(normed)

    def rope_positions(self, positions: torch.Tensor) -> list[Any]:
        found = []
        for rope in self.architecture.ropes:
            axes = list(rope.axes or [0] * len(rope.frequencies))
            places = positions[axes].T if positions.ndim == 2 else positions[:, None]
            angles = places.float() * rope.frequencies
            cos, sin = ((t * rope.scale).to(self.dtype) for t in (angles.cos(), angles.sin()))
            found.append((torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]))
        return found

    def rope(self, heads: Heads, positions: Any) -> Heads:
        cos, sin = positions
        turned, both = cos.shape[-1], torch.cat(heads, 1)
        part = both[..., :turned]
        rolled = (part * cos).add_(part.roll(turned // 2, -1).mul_(sin))
        if turned < both.shape[-1]:
            rolled = torch.cat([rolled, both[..., turned:]], -1)
        return rolled.split([x.shape[1] for x in heads], 1)

    def activation(self, mlp: MLP, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        if not mlp.gated:
            return activate(mlp.activation, gate_up(x))
        gate, up = gate_up
        return activate(mlp.activation, gate(x), up(x))


def _fast_bfloat16() -> bool:
    """Whether torch uses instructions of this CPU for products in bfloat16."""
    mkldnn = torch.backends.mkldnn.is_available()
    return mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
