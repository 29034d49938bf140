"""Chooses the decoder loop's operations: those that go with the attention backend."""

from __future__ import annotations

import logging

import torch

from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.native.attention import NativeBackend
from radixcache.runtime.model.architecture import Architecture
from radixcache.runtime.model.operations.base import Operations
from radixcache.runtime.model.operations.fused import FusedOperations, try_out
from radixcache.runtime.model.operations.native import NativeOperations

_log = logging.getLogger("radixcache")


def choose_operations(
    architecture: Architecture, attention: AttentionBackend, dtype: torch.dtype
) -> Operations:
    """Native kernels or FlashInfer's where they attend, too, and run; else plain torch."""
    if isinstance(attention, NativeBackend):
        return NativeOperations(architecture, dtype)
    if attention.name.startswith("FlashInfer"):
        try:
            fused = FusedOperations(architecture, dtype)
            try_out(fused, architecture, dtype)
        except Exception as error:  # whatever a missing kernel, compiler or driver raises
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            _log.warning("norms, RoPE and activations run in torch: FlashInfer: %s", first)
        else:
            return fused
    return Operations(architecture, dtype)
