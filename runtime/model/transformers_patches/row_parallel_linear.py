"""The linear layers of one rank, as plain layers over its part of the weights.

transformers' tensor-parallel wrappers keep weights as DTensors. Plain layers cost nothing to enter,
and can be packed like those of a model in one process.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class RowParallelLinear(nn.Module):
    """A row-wise layer: the sum of the ranks' products of their own inputs."""

    def __init__(self, local: nn.Linear) -> None:
        super().__init__()
        self.local, self.bias = local, local.bias
        local.register_parameter("bias", None)  # added once, not by each rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.local(x)
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


@torch.inference_mode()
def take_local(model: PreTrainedModel) -> None:
    """Replace the layers that the model's plan cuts by columns or rows; leave the others."""
    for name, module in list(model.named_modules()):
        style = model.tp_plan.get(re.sub(r"\b\d+\b", "*", name))
        if style not in ("colwise", "rowwise") or type(module) is not nn.Linear:
            continue
        local = nn.Linear(1, 1, bias=False, device="meta")
        for part, given in module.named_parameters():
            assert isinstance(given, DTensor)
            setattr(local, part, nn.Parameter(given.to_local(), requires_grad=False))
        local.out_features, local.in_features = local.weight.shape
        model.set_submodule(name, RowParallelLinear(local) if style == "rowwise" else local)
