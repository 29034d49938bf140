"""transformers' linear layers with packed weights and the native kernels."""

from __future__ import annotations

import torch
from torch import nn

from radixcache.kernels.huge_pages import use_huge_pages
from radixcache.kernels.native.library import DTYPES, problem
from radixcache.kernels.native.linear import PackedLinear


class NativeLinear(nn.Module):
    """`nn.Linear` for inference; a row's result has the same bits beside any other rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self._dtype = linear.bias, linear.weight.dtype
        bias = None if linear.bias is None else linear.bias.detach()
        self.packed = PackedLinear(_narrow(linear.weight.detach()), bias)

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], unpacked for modelling code that reads it."""
        return self.packed.weight.to(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        return self.packed(rows).view(*x.shape[:-1], self.out_features)


def _narrow(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bfloat16 if that loses nothing, as it was stored: half the memory is read."""
    if weight.stride(-1) != 1:
        weight = weight.contiguous()
    if weight.dtype == torch.float32:
        low = weight.view(torch.int32) & 0xFFFF
        if not low.any():
            return weight.bfloat16()
    return weight


@torch.inference_mode()
def pack_linears(model: nn.Module) -> None:
    """Replace the model's linear layers on a CPU where the native kernels run.

    Quantized weights, which have other tensor classes, and other dtypes stay. The old weights are
    freed unless they are shared, for example with an embedding.
    """
    packed = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
                continue
            if child.weight.is_cpu and child.weight.dtype in DTYPES and problem() is None:
                packed.append(NativeLinear(child))
                setattr(module, name, packed[-1])
    use_huge_pages(linear.packed.block for linear in packed)
    if packed:  # a checkpoint's file stays in memory while one tensor is a view of it
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:
                parameter.data = parameter.data.clone()
