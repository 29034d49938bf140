"""Panels of weights of every format, and the bits of floats, for tests of CPU kernels."""

from __future__ import annotations

import numpy as np
import torch

from radixcache.kernels.quantized import E2M1, E4M3, INT4, INT8, Quantized

FORMATS = ["float32", "bfloat16", "8 bits of 32", "4 bits of 32", "4 bits of 16"]
LEVELS = {"floats": E2M1, "wide levels": (*range(-128, 128, 17),)}
FORMATS += [f"4 bits, {levels} of {block}" for levels in LEVELS for block in (32, 16)]
FORMATS += ["8 bits, int8 of 32", "8 bits, int8 of 16", "4 bits, int4 of 32"]
LEVELS |= {"int4": INT4, "int8": INT8}
WHOLE = FORMATS[2:]  # numbers that rows in 8 bits meet
LEVELS |= {"e4m3": E4M3, "quantiles": (*torch.linspace(-1, 1, 18)[1:-1].erfinv().tolist(),)}
FORMATS += ["4 bits, quantiles of 32", "8 bits, e4m3 of 32"]
COUNTS = (2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 25, 48, 95, 96, 97, 140)
F32, BF16 = torch.float32, torch.bfloat16


def make(kind: str, outer: int, inner: int, seed: int = 0) -> torch.Tensor | Quantized:
    rng = torch.Generator().manual_seed(seed)
    if kind in ("float32", "bfloat16"):
        weight = torch.randn(outer, inner, generator=rng).mul_(inner**-0.5)
        return weight.to(getattr(torch, kind))
    number, block = int(kind[0]), int(kind[-2:])
    numbers = torch.randint(0, 1 << number, (outer, inner), generator=rng, dtype=torch.uint8)
    scales, minimums = torch.rand(2, outer, inner // block, generator=rng).mul_(0.01).half().float()
    levels = next((table for name, table in LEVELS.items() if name in kind), ())
    if levels is E4M3:
        numbers[numbers & 127 == 127] = 8  # no NaN
    minimum = None if levels else -(1 << number - 1) * minimums
    return Quantized(numbers, scales, minimum, number, levels)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Signs of zeros and all."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == F32 else torch.int16).numpy()
