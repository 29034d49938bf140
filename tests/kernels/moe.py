"""A stand-in for the C++ behind FlashInfer's `cutlass_fused_moe`, in plain torch; what that checks
is an assertion here (flashinfer_cutlass_fused_moe_binding.cu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from tests.kernels.gpu import Kernels

_GATED = {"Swiglu", "Geglu", "GegluTanh"}


class MoE:
    """The module that is built for one kind of GPU.

    Attributes:
        is_compiled: whether somebody has built it.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.is_compiled = kernels, True
        self.set_deepgemm_jit_include_dirs = lambda _: None
        self.interleave_moe_weights_for_sm90_mixed_gemm = None

    def build_and_load(self) -> MoE:
        assert self.is_compiled, "nobody waits for its 220 sources"
        return self

    def init(self, x: Any, weight: Any, out: Any, *flags: bool) -> SimpleNamespace:
        known = self.kernels.any_dtype or x in (torch.float16, torch.bfloat16)
        assert x == weight == out and known, f"Could not construct fused moe op for {x}"
        assert not any(flags), "quantized, or with sums by atomics: other bits each time"
        self.dtype = x
        return SimpleNamespace(run_moe=self.run_moe)

    def run_moe(
        self, out: Any, x: Any, chosen: Any, factors: Any, fc1: Any, bias1: Any, fc2: Any,
        bias2: Any, quant_scales: Any, input_sf: Any, alpha: Any, beta: Any, limit: Any,
        relu2_limit: Any, situ_beta: Any, situ_linear_beta: Any, swizzled: bool, *rest: Any,
    ) -> None:  # fmt: skip
        from flashinfer.tllm_enums import ActivationType

        *parallel, alltoall, latency, profile_ids, _, kind, workspace = rest
        assert parallel == [1, 0, 1, 0, 1, 0] and not alltoall and not latency
        assert [quant_scales, profile_ids, workspace] == [None, [-1, -1], None]
        assert {input_sf, relu2_limit, situ_beta, situ_linear_beta} == {None}
        name = ActivationType(kind).name
        own = {"input": x, "output": out, "fc1": fc1, "fc2": fc2}
        if bias1 is not None or bias2 is not None:
            own |= {"fc1 bias": bias1, "fc2 bias": bias2}
            assert bias1.shape == fc1.shape[:2] and bias2.shape == fc2.shape[:2]
        self.kernels.check(chosen=chosen, factors=factors, **own)
        assert all(tensor.dtype == self.dtype for tensor in own.values())
        assert chosen.dtype == torch.int32 and factors.dtype == torch.float32
        assert x.ndim == chosen.ndim == 2 and factors.shape == chosen.shape
        count, hidden, inner = fc2.shape
        assert len(x) == len(chosen) and x.shape[1] == hidden and out.shape == x.shape
        assert fc1.shape == (count, inner * (1 + (name in _GATED)), hidden)
        assert hidden % 8 == inner % 8 == 0, "TMA requires 128 bits"
        limits = {"alpha": alpha, "beta": beta, "limit": limit}
        limits = {key: value for key, value in limits.items() if value is not None}
        self.kernels.check(**limits)
        for value in limits.values():
            assert value.dtype == torch.float32 and value.shape == (count,)
        arrays = (x, chosen, factors, fc1, bias1, fc2, bias2, out)
        self.kernels.device.launch(self.cutlass_fused_moe, *arrays, name, limits)

    def cutlass_fused_moe(
        self, x: Any, chosen: Any, factors: Any, fc1: Any, bias1: Any, fc2: Any, bias2: Any,
        out: Any, name: str, limits: dict[str, Any],
    ) -> None:  # fmt: skip
        self.kernels.calls["cutlass_fused_moe"] += 1
        assert ((chosen >= 0) & (chosen < len(fc1))).all(), "an expert that is not there"
        total = torch.zeros(x.shape, dtype=torch.float64)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            one = {key: float(value[expert]) for key, value in limits.items()}
            inner = x[rows].double() @ fc1[expert].double().T
            inner = inner if bias1 is None else inner + bias1[expert].double()
            found = _activated(inner, name, one) @ fc2[expert].double().T
            found = found if bias2 is None else found + bias2[expert].double()
            total.index_add_(0, rows, found * factors[rows, places].double()[:, None])
        out.copy_(total)


def _activated(inner: torch.Tensor, name: str, limits: dict[str, float]) -> torch.Tensor:
    """cutlass_fused_moe_kernels.cuh: the linear part comes first, the gate second."""
    if name == "Relu2":
        return F.relu(inner).square()
    up, gate = inner.chunk(2, -1)
    if not limits:
        if name == "Swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh" if name == "GegluTanh" else "none") * up
    assert name == "Swiglu"  # else they would count for nothing
    most = limits.get("limit", torch.inf)
    gate = gate.clamp(max=most)
    up = up.clamp(-most, most) + limits.get("beta", 0.0)
    return gate * (gate * limits.get("alpha", 1.0)).sigmoid() * up
