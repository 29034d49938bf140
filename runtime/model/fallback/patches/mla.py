"""Multi-head latent attention (MLA, DeepSeek-V2) over pages of latents.

MLA computes the keys and values of all heads from one latent per token, by `kv_b_proj`, and one
rotated part of the key, which all heads share. transformers expands both in `expand_kv`. Here pages
keep the latent and the rotated part; the query absorbs the key half of `kv_b_proj` and the output
the value half (section 2.1.2 of arXiv 2405.04434), and attention runs with a single KV head.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel


class AbsorbedProjection(nn.Module):
    """A layer's `kv_b_proj`, [heads * (nope + value dim), rank], for queries and outputs."""

    def __init__(self, projection: nn.Linear, nope: int, value_dim: int) -> None:
        super().__init__()
        self.weight, self.nope, self._head = projection.weight, nope, nope + value_dim

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """Unchanged: keys and values of all heads, for transformers' own attention."""
        return linear(latent, self.weight)

    def to_latent(self, query: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, nope + rope] -> [1, heads, T, rank + rope]."""
        nope, rope = query.split([self.nope, query.shape[-1] - self.nope], dim=-1)
        keys = self.weight.unflatten(0, (-1, self._head))[:, : self.nope]
        return torch.cat([nope @ keys, rope], dim=-1)

    def from_latent(self, out: torch.Tensor) -> torch.Tensor:
        """[T, heads, rank] -> [T, heads, value dim]."""
        values = self.weight.unflatten(0, (-1, self._head))[:, self.nope :]
        return (out.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)


def keep_latents(model: PreTrainedModel, implementation: str) -> bool:
    """Make the model's MLA layers hand latents to attention of that name; returns if it has any.

    A layer without `expand_kv`, or whose `kv_b_proj` is not a plain linear layer, as in a quantised
    checkpoint, still expands keys and values.
    """
    found = False
    modules: list[Any] = list(model.modules())
    for module in modules:
        projection = getattr(module, "kv_b_proj", None) if hasattr(module, "expand_kv") else None
        if type(projection) is not nn.Linear or projection.bias is not None:
            continue
        module.kv_b_proj = AbsorbedProjection(
            projection, module.qk_nope_head_dim, module.v_head_dim
        )
        module.expand_kv = partial(_expand, proxy(module), implementation)  # no circle
        found = True
    return found


def _expand(module: Any, implementation: str, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
    """Replaces `expand_kv`: [1, 1, T, rank] and [1, 1, T, rope] for our attention."""
    if module.config._attn_implementation == implementation:
        return latent, rotated
    return module.__class__.expand_kv(module, latent, rotated)
