"""Makes transformers' layers exact: a row's bits depend only on its own tokens.

torch's elementwise functions compute the last elements of each thread's part by scalar code, which
may round differently from vector code. So activations run in our own kernels, or on whole vectors
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, activations

from radixcache.errors import ModelError
from radixcache.kernels.native.activations import gated
from radixcache.runtime.model.transformers_patches.linear import pack_linears

_VECTORS = 64
"""The most elements that torch takes at a time: two vectors of AVX-512, of 16-bit numbers."""
_PART = 1 << 14
"""Elements of a call: from twice as many on, torch uses several threads."""
_NATIVE: dict[type[nn.Module], Any] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUTanh: "gelu_tanh",
}
_KINDS = {kind[0] if isinstance(kind, tuple) else kind for kind in activations.ACT2CLS.values()}


class _Native(nn.Module):
    """An activation by a native kernel."""

    def __init__(self, name: Any) -> None:
        super().__init__()
        self._name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ones = rows.new_ones(rows.shape[1]).expand_as(rows)
        return gated(rows, ones, self._name).view(x.shape)


class _Whole(nn.Module):
    """An elementwise function of torch, none of whose elements is left to scalar code."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = pad(x.flatten(), (0, -x.numel() % _VECTORS))
        parts = [self._function(part) for part in flat.split(_PART)]
        return torch.cat(parts)[: x.numel()].view(x.shape)


def make_exact(model: PreTrainedModel) -> None:
    """Pack all linear layers, and replace activations.

    Raises:
        ModelError: it has weights that are multiplied by in other ways, of unknown bits.
    """
    pack_linears(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in _NATIVE:
                setattr(module, name, _Native(_NATIVE[type(child)]))
            elif type(child) in _KINDS:
                setattr(module, name, _Whole(child))
    for name, module in model.named_modules():
        owned = module.parameters(recurse=False)
        if not isinstance(module, nn.Embedding) and any(weight.ndim > 1 for weight in owned):
            raise ModelError(
                f"model type {model.config.model_type!r} cannot run in exact mode: "
                f"its {name} ({type(module).__name__}) is no linear layer"
            )
