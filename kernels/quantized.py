"""Quantized weights in a form that fits all block formats of GGUF: numbers, scales and minimums.

A weight is `number * scale + minimum`, computed in float32 with one rounding. In all formats,
number * scale has at most 24 bits, so the result equals the format's own rule to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Quantized(NamedTuple):
    """A weight [out, in] whose rows are cut into blocks of 16 or 32 numbers.

    Attributes:
        numbers: uint8 [out, in], from 0 on: below 16 where `bits` is 4.
        scales: float32 [out, in / block].
        minimums: float32 [out, in / block], what a number of 0 stands for.
        bits: 4 (blocks of 32 only) or 8.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.numbers.shape
        return rows, columns

    @property
    def block(self) -> int:
        """Numbers that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    def rows(self, ids: torch.Tensor) -> Quantized:
        """The rows with these numbers."""
        return Quantized(self.numbers[ids], self.scales[ids], self.minimums[ids], self.bits)

    @staticmethod
    def join(parts: Sequence[Quantized]) -> Quantized:
        """Stack weights of one format along their rows."""
        return Quantized(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.minimums for part in parts]),
            parts[0].bits,
        )

    def dense(self) -> torch.Tensor:
        """float32 [out, in]."""
        blocks = self.numbers.float().unflatten(1, (-1, self.block))
        blocks.mul_(self.scales[..., None])  # exact
        return blocks.add_(self.minimums[..., None]).flatten(1)
