"""Encodes keys and values for pages of another dtype than the model's.

Pages of float16 and bfloat16 hold rounded numbers. Pages of int8 hold a head in blocks of 32: a
float16 scale, then 32 numbers of 8 bits (GGUF's q8_0), so that no copy of a page can lose a scale.
Each token is rounded by itself, and reading is exact: int8 times float16 fits float32. Pages of fp8
hold e4m3, with one scale per layer.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
BLOCK, BLOCK_BYTES = 32, 34


def stored_dim(dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that a head of `dim` numbers takes in a page."""
    return dim // BLOCK * BLOCK_BYTES if dtype == torch.int8 else dim


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
    return torch.cat([scales.view(torch.int8), numbers], -1).flatten(-2)


def decode(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `encode`: heads [..., dim] in `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    blocks = stored.unflatten(-1, (-1, BLOCK_BYTES))
    scales = blocks[..., :2].contiguous().view(torch.float16)
    return (blocks[..., 2:] * scales.float()).flatten(-2).to(dtype)
