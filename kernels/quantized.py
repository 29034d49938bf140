"""Quantized weights in a form that fits all block formats of GGUF: numbers, scales and minimums.

A weight is `number * scale + minimum`, computed in float32 with one rounding. In all formats,
number * scale has at most 24 bits, so the result equals the format's own rule to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Numbers, scales and minimums, as `Quantized` has them."""

E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""MXFP4's 16 codes are floats of 4 bits: twice their values, from -12 on."""

_WEIGHTS_AT_ONCE = 1 << 21  # intermediate results of decoding stay in the caches


class Quantized:
    """A weight [out, in] whose rows are cut into blocks of 16 or 32 numbers.

    Attributes:
        numbers: uint8 [out, in], below 16 where `bits` is 4; with `levels`, indices into these.
        scales: float32 [out, in / block].
        minimums: float32 [out, in / block], what a number of 0 stands for.
        bits: 4 (blocks of 32 only) or 8.
        block: numbers that share a scale.
        levels: the values of the 16 codes, if the numbers are codes of 4 bits; else empty.
    """

    levels: tuple[int, ...] = ()

    def __init__(
        self,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor,
        bits: int,
        levels: tuple[int, ...] = (),
    ) -> None:
        self._tables = numbers, scales, minimums
        self.bits, self.levels = bits, levels
        self.block = numbers.shape[1] // scales.shape[1]
        self.shape = cast(tuple[int, int], tuple(numbers.shape))

    @property
    def format(self) -> tuple[int, int, tuple[int, ...]]:
        """Bits, block and levels: weights of one format can be joined."""
        return self.bits, self.block, self.levels

    def tables(self) -> Tables:
        return self._tables

    def rows(self, ids: torch.Tensor) -> Quantized:
        """The rows with these numbers."""
        numbers, scales, minimums = (table[ids] for table in self.tables())
        return Quantized(numbers, scales, minimums, self.bits, self.levels)

    def columns(self, ids: torch.Tensor) -> Quantized | None:
        """The columns [in] with these numbers; None if blocks would be cut."""
        blocks = ids[:: self.block] // self.block
        whole = (blocks[:, None] * self.block + torch.arange(self.block)).flatten()
        if not torch.equal(ids, whole):
            return None
        numbers, scales, minimums = self.tables()
        return Quantized(
            numbers[:, ids], scales[:, blocks], minimums[:, blocks], self.bits, self.levels
        )

    @staticmethod
    def join(parts: Sequence[Quantized]) -> Quantized:
        """Stack weights of one format along their rows."""
        if len(parts) == 1:
            return parts[0]
        stored = [part for part in parts if isinstance(part, Stored)]
        if len(stored) == len(parts):
            return Stored([rows for part in stored for rows in part.parts])
        numbers, scales, minimums = map(torch.cat, zip(*(x.tables() for x in parts), strict=True))
        return Quantized(numbers, scales, minimums, parts[0].bits, parts[0].levels)

    def dense(self) -> torch.Tensor:
        """float32 [out, in]."""
        numbers, scales, minimums = self.tables()
        if self.levels:
            numbers = torch.tensor(self.levels, device=numbers.device)[numbers.int()]
        blocks = numbers.float().unflatten(1, (-1, self.block))
        blocks.mul_(scales[..., None])  # exact
        return blocks.add_(minimums[..., None]).flatten(1)

    def times_rounded(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, out] of rows [T, in] that are rounded to 8 bits, to the bit of rounded.h."""
        numbers, scales, minimums = self.tables()
        if self.levels:
            numbers = torch.tensor(self.levels)[numbers.int()]
        rows, depth = x.shape
        blocks = x.new_zeros(rows, -(-depth // 32) * 32, dtype=torch.float32)
        blocks[:, :depth] = x
        blocks = blocks.unflatten(1, (-1, 32))
        most = blocks.abs().amax(-1, keepdim=True)
        # A plain number over a tensor would be rounded twice: torch inverts the tensor first.
        factors = torch.where(most > 1e-30, torch.full_like(most, 127) / most, torch.zeros(()))
        whole = (blocks * factors).round().flatten(1)[:, :depth].unflatten(1, (-1, self.block))
        row_scales = (most / 127).repeat_interleave(32 // self.block, 1)
        columns = numbers.unflatten(1, (-1, self.block)).float()
        out = x.new_zeros(rows, len(numbers), dtype=torch.float32)
        for at in range(scales.shape[1]):  # sums of whole numbers below 2^24 are exact
            products = (whole[:, at] @ columns[:, at].T) * scales[:, at]
            products += whole[:, at].sum(1, keepdim=True) * minimums[:, at]
            out += products * row_scales[:, at]
        return out


def dense(weight: torch.Tensor | Quantized) -> torch.Tensor:
    """A quantized weight as float32; any other as it is."""
    return weight.dense() if isinstance(weight, Quantized) else weight


@dataclass(frozen=True)
class Layout:
    """How a format of GGUF stores its blocks.

    Attributes:
        name: the format's.
        decode: from stored blocks [N, bytes] to numbers [N, ...], and scales and minimums
            [N, blocks].
        bits, block: as `Quantized` has them.
        size, stored: weights and bytes of a stored block.
        levels: as `Quantized` has them.
    """

    name: str
    decode: Callable[[torch.Tensor], Tables]
    bits: int
    block: int
    size: int
    stored: int
    levels: tuple[int, ...] = ()


class Stored(Quantized):
    """A weight as its file stores it; it is decoded each time that its numbers are asked for.

    Attributes:
        parts: stored rows, uint8 [out, bytes], below each other, and their layouts, which have the
            same bits and blocks.
        release: gives back the memory of a file's rows that were read, if they stand in one.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Layout, torch.Tensor]],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts, self.release = [*parts], release
        layout, rows = self.parts[0]
        self.bits, self.block, self.levels = layout.bits, layout.block, layout.levels
        self.shape = sum(len(x) for _, x in parts), rows.shape[1] // layout.stored * layout.size

    def tables(self) -> Tables:
        numbers, scales, minimums = zip(*(_decode(*part) for part in self.parts), strict=True)
        return torch.cat(numbers), torch.cat(scales), torch.cat(minimums)

    def rows(self, ids: torch.Tensor) -> Quantized:
        if len(self.parts) > 1:
            return super().rows(ids)
        return Stored([(layout, rows[ids]) for layout, rows in self.parts])


def _decode(layout: Layout, rows: torch.Tensor) -> Tables:
    """Decode some blocks at a time."""
    stored, shape = rows.reshape(-1, layout.stored), (len(rows), -1)
    numbers = torch.empty(len(stored), layout.size, dtype=torch.uint8)
    scales, minimums = torch.empty(2, len(stored), layout.size // layout.block)
    step = _WEIGHTS_AT_ONCE // layout.size
    for at in range(0, len(stored), step):
        part = slice(at, at + step)
        found, scales[part], minimums[part] = layout.decode(stored[part])
        numbers[part] = found.view(-1, layout.size)
    return numbers.view(shape), scales.view(shape), minimums.view(shape)
