"""Chooses the decoder loop's operations: those that go with the attention backend."""

from __future__ import annotations

import logging
from functools import partial

import torch

from radixcache.errors import first_line
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.native.attention import NativeBackend
from radixcache.runtime.model.description import Architecture, Unknown
from radixcache.runtime.model.operations.base import Operations
from radixcache.runtime.model.operations.fused import tried
from radixcache.runtime.model.operations.native import NativeOperations

_log = logging.getLogger("radixcache")


def choose_operations(
    architecture: Architecture,
    attention: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> Operations:
    """Native kernels or FlashInfer's, if the attention uses them and they run; else torch.

    Raises:
        Unknown: none of these run the architecture.
    """
    if isinstance(attention, NativeBackend):
        return NativeOperations(architecture, dtype)
    if architecture.is_recurrent:  # torch would launch its calls token by token
        raise Unknown("its recurrent layers need the native kernels")
    if attention.name.startswith("FlashInfer"):
        fused, errors = first_that_runs(partial(tried, architecture, dtype, device))
        if fused is not None:
            return fused
        reason = first_line(errors[0])
        _log.warning("norms, RoPE and activations run in torch: FlashInfer: %s", reason)
    return Operations(architecture, dtype)
