"""Gated activations on a CPU."""

from __future__ import annotations

import torch

from radixcache.kernels.native.library import check, kernel

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "clamped")  # in the order of rows.h


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up`, both [rows, width]; they may be columns of one product.

    Args:
        activation: of `ACTIVATIONS`; `clamped` is gpt-oss's.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r}")
    (rows, width), out = gate.shape, gate.new_empty(gate.shape)
    check(gate, gate, gate.shape, apart=True)
    check(up, gate, gate.shape, apart=True)
    kernel("activate", gate.dtype)(
        *(gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width),
        *(gate.stride(0), up.stride(0), ACTIVATIONS.index(activation)),
    )
    return out
