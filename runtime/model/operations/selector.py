"""Chooses the decoder loop's operations to match the attention backend."""

from __future__ import annotations

import logging
from functools import partial

import torch

from radixcache.errors import first_line
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.recurrence import Recurrence, Slots, Tokens
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
        Unknown: no operations run the architecture.
    """
    if isinstance(attention, NativeBackend):
        return NativeOperations(architecture, dtype)
    recur = find_recurrence(architecture, device)
    if attention.name.startswith("FlashInfer"):
        fused, errors = first_that_runs(partial(tried, architecture, dtype, device, recur))
        if fused is not None:
            return fused
        reason = first_line(errors[0])
        _log.warning("norms, RoPE and activations run in torch: FlashInfer: %s", reason)
    return Operations(architecture, dtype, recur)


def find_recurrence(architecture: Architecture, device: torch.device) -> Recurrence | None:
    """The kernel for the model's delta nets and Mamba 2, after it has run once; None for a model
    without them.

    Raises:
        Unknown: no kernel runs. transformers' layers, which take a prompt in chunks, are faster
            than torch's operations, launched token by token.
    """
    if all(kind == "conv" for kind, *_ in architecture.state_shapes):
        return None
    if device.type == "cpu":
        raise Unknown("its recurrent layers need the native kernels")
    found, errors = first_that_runs(partial(_tried_recurrence, device))
    if found is None:
        reason = f"its recurrent layers need Triton: {first_line(errors[0])}"
        _log.warning("transformers' layers run this model, without graphs: %s", reason)
        raise Unknown(reason)
    return found


@torch.inference_mode()
def _tried_recurrence(device: torch.device) -> Recurrence:
    from radixcache.kernels.triton_recurrence import recur

    numbers = torch.arange(2, dtype=torch.int32, device=device)
    row = torch.zeros(1, 1, 8, device=device)
    tokens = Tokens(row, row, row, row[0, :, :1], row[0, :, :1], delta=True)
    slots = Slots(numbers, numbers[1:] - 2, numbers[:1], numbers[1:] - 2)
    if recur(torch.zeros(1, 1, 8, 8, device=device), tokens, slots).any():
        raise RuntimeError("its kernel gives wrong results")  # a failed launch shows here
    return recur
