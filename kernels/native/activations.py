"""Gated activations on a CPU."""

from __future__ import annotations

from typing import Literal

import torch

from radixcache.kernels.native.library import check, kernel


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: Literal["silu", "gelu_tanh"]
) -> torch.Tensor:
    """`activation(gate) * up`, both [rows, width]; they may be columns of one product."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"no activation {activation!r}")
    (rows, width), out = gate.shape, gate.new_empty(gate.shape)
    check(gate, gate, gate.shape, apart=True)
    check(up, gate, gate.shape, apart=True)
    kernel("activate", gate.dtype)(
        *(gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width),
        *(gate.stride(0), up.stride(0), activation != "silu"),
    )
    return out
