"""Encodes keys and values for pages of another dtype than the model's.

Pages of float16 and bfloat16 hold rounded numbers. Pages of int8 hold a head's numbers in 8 bits,
and behind them a float16 scale for each 32, so that no copy of a page can lose a scale, and a GPU
loads several numbers at once. Each token is rounded by itself, and reading is exact: int8 times
float16 fits float32. Pages of fp8 hold e4m3, with one scale per layer.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
BLOCK = 32


def stored_dim(dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that a head of `dim` numbers takes in a page."""
    return dim + dim // BLOCK * 2 if dtype == torch.int8 else dim


def encode(heads: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Encode heads [..., dim] for pages of `dtype`, [..., `stored_dim`]; a NaN stays one.

    Args:
        scale: for fp8; values beyond 448 times it are clamped.
    """
    if dtype == FP8:
        most = torch.finfo(FP8).max
        return (heads / scale).clamp(-most, most).to(FP8)
    if dtype != torch.int8:
        return heads.to(dtype)
    blocks = heads.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    factors = torch.where(scales == 0, 0, 1 / scales.float())
    numbers = (blocks * factors).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([numbers.flatten(-2), scales.view(torch.int8).flatten(-2)], -1)


def isolate(
    key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, *, mla: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`key` and `value` [T, heads, dim], but NaN and 0 where pages of `dtype` would not hold both
    as finite numbers: masks replace scores, but 0 * inf is NaN. So only rows that see such a token
    become NaN. MLA's values are its keys but for the rotated part `value`, which is NaN."""

    def fits(side: torch.Tensor) -> torch.Tensor:
        most = side.abs().amax(-1, keepdim=True)
        return ((most.float() / 127).half() if dtype == torch.int8 else most.to(dtype)).isfinite()

    bad = ~(fits(key) & fits(value))
    fills = (0, torch.nan) if mla else (torch.nan, 0)
    return key.masked_fill(bad, fills[0]), value.masked_fill(bad, fills[1])


def decode(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `encode`: heads [..., dim] in `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    count = stored.shape[-1] // (BLOCK + 2)
    numbers = stored[..., : count * BLOCK].unflatten(-1, (count, BLOCK))
    scales = stored[..., count * BLOCK :].contiguous().view(torch.float16)
    return (numbers * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
