"""A mixture of experts by FlashInfer's `cutlass_fused_moe`: GPUs from SM89 on.

One call sorts rows by expert, runs both grouped products with the activation between them, and adds
each row's results up, in a fixed order and without waiting for the device. It must be built
before: at a start, its 220 sources for Hopper would take too long to compile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from radixcache.kernels.capture import Capture
from radixcache.kernels.flashinfer.load import load_flashinfer
from radixcache.kernels.spec import Architecture, Experts
from radixcache.kernels.torch.experts import GroupedExperts

_ACTIVATIONS = {
    ("silu", True): "Swiglu", ("clamped", True): "Swiglu", ("gelu", True): "Geglu",
    ("gelu_tanh", True): "GegluTanh", ("relu2", False): "Relu2",
}  # fmt: skip
"""The kernel's name of an activation, by our name and whether it is gated."""

_ALIGNED = 8  # 16-bit numbers; TMA needs sizes in multiples of it
_ROWS = 40
_TOLERANCE = 0.05  # of a row's norm; roundings to bfloat16 give up to 0.01, wrong constants 0.2

_SM = {107: 100, 110: 100, 121: 120}
"""GPUs that run another GPU's kernel."""


class FusedExperts(GroupedExperts):
    """Experts whose weights the kernel reads: [count, 2 * inner, hidden], up before gate, and
    [count, hidden, inner]."""

    def __init__(self, spec: Experts, *of_the_layer: Any) -> None:
        super().__init__(spec, *of_the_layer)
        (self._fc1, bias1), (self._fc2, bias2) = self._up, self._down
        self._kernel: Any = load_flashinfer().cutlass_fused_moe
        kinds = load_flashinfer().fused_moe.core.ActivationType
        name = _ACTIVATIONS[spec.each.activation, spec.each.gated]
        self._options = {
            "fc1_expert_biases": bias1, "fc2_expert_biases": bias2, "activation_type": kinds[name],
            "use_fused_finalize": False,  # it would add by atomics, in any order
            "profile_ids": [-1, -1],  # the kernels of an untuned process
        }  # fmt: skip
        if spec.each.activation == "clamped":
            for key, value in (("alpha", 1.702), ("beta", 1.0), ("limit", 7.0)):
                self._options[f"swiglu_{key}"] = self._router.new_full((spec.count,), value)

    @staticmethod
    def takes(architecture: Architecture, spec: Experts) -> bool:
        """Whether the kernel supports the activation and the sizes."""
        sizes = (spec.latent or architecture.hidden_size, spec.each.inner)
        known = (spec.each.activation, spec.each.gated) in _ACTIVATIONS
        return known and not any(size % _ALIGNED for size in sizes)

    def mixed(self, x: torch.Tensor, factors: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._kernel(
            x, chosen.int().contiguous(), factors, self._fc1, self._fc2, x.dtype, None, output=out,
            **self._options,
        )  # fmt: skip
        return out

    @torch.inference_mode()
    def compare(self) -> None:
        """Compare the kernel with grouped products on random rows and choices, also in a graph.

        Raises:
            RuntimeError: the kernel gives other results, is not built, or does not run on this GPU.
        """
        spec, device = self._spec, self._fc1.device
        _check_built(device)
        generator = torch.Generator().manual_seed(0)

        def random(count: int) -> torch.Tensor:
            return torch.rand(_ROWS, count, generator=generator).to(device)

        chosen, factors = random(spec.count).argsort(1)[:, : spec.active], random(spec.active)
        rows = (random(self._fc1.shape[2]) - 0.5).to(self._fc1.dtype)
        # Small rows show biases; larger ones reach the activation's bend, and then its limits.
        scales = torch.linspace(0.25, 6, _ROWS, device=device, dtype=rows.dtype)[:, None]
        rows = rows / F.linear(rows, self._fc1[0]).std() * scales
        expected = super().mixed(rows, factors, chosen).float()
        replay = Capture(device)(partial(self.mixed, rows, factors, chosen))
        for found in (self.mixed(rows, factors, chosen), replay()):
            error = float(((found.float() - expected).norm(dim=1) / expected.norm(dim=1)).max())
            if not error <= _TOLERANCE:  # NaN, too
                raise RuntimeError(f"its kernel for experts is off by {error:.0%}")


def _check_built(device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    sm = 10 * major + minor
    core = load_flashinfer().fused_moe.core
    make = getattr(core, f"gen_cutlass_fused_moe_sm{_SM.get(sm, sm)}_module", None)
    if make is None:
        raise RuntimeError(f"its kernel for experts is not for GPUs of SM{sm}")
    if not make().is_compiled:
        raise RuntimeError(
            "its kernel for experts is not built; `flashinfer download-kernels` fetches it"
        )
