"""Chooses the decoder loop's operations: those that go with the attention backend."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

import torch

from radixcache.errors import first_line
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.recurrence import Heads, Recurrence, Slots, Tokens
from radixcache.runtime.model.description import Architecture, DeltaNet, Mamba2, Unknown
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
    recur = find_recurrence(architecture, device)
    if attention.name.startswith("FlashInfer"):
        fused, errors = first_that_runs(partial(tried, architecture, dtype, device))
        if fused is not None:
            fused.recur = recur
            return fused
        reason = first_line(errors[0])
        _log.warning("norms, RoPE and activations run in torch: FlashInfer: %s", reason)
    operations = Operations(architecture, dtype)
    operations.recur = recur
    return operations


def find_recurrence(architecture: Architecture, device: torch.device) -> Recurrence | None:
    """The kernel for the model's delta nets and Mamba 2, after it has run once for each kind, which
    compiles it; None for a model without them.

    Raises:
        Unknown: there is none. torch's operations would be launched token by token, where
            transformers' layers take a prompt in chunks.
    """
    kinds = {x.mixer.sizes for x in architecture.layers if isinstance(x.mixer, DeltaNet | Mamba2)}
    if not kinds:
        return None
    if device.type == "cpu":
        raise Unknown("its recurrent layers need the native kernels")
    found, errors = first_that_runs(partial(_tried_recurrence, kinds, device))
    if found is None:
        reason = f"its recurrent layers need Triton: {first_line(errors[0])}"
        _log.warning("transformers' layers run this model, without graphs: %s", reason)
        raise Unknown(reason)
    return found


@torch.inference_mode()
def _tried_recurrence(kinds: Iterable[Heads], device: torch.device) -> Recurrence:
    from radixcache.kernels.triton_recurrence import recur

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(2, *shape, device=device)

    numbers = torch.arange(3, dtype=torch.int32, device=device)
    none = torch.full_like(numbers[:2], -1)
    for groups, heads, key, value, delta in kinds:
        rows = (groups, key), (groups, key), (heads, value), (heads,), (heads,)
        tokens = Tokens(*(zeros(*shape) for shape in rows), delta=delta)  # type: ignore[misc, arg-type]
        out = recur(zeros(heads, key, value), tokens, Slots(numbers, none, numbers[:2], none))
        if out.any():  # copies to the host: a failed launch shows
            raise RuntimeError("its kernel gives wrong results")
    return recur
