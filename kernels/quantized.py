"""Quantized weights in a form that fits all block formats: numbers, scales, and minimums or levels.

A weight is `number * scale + minimum`, or `level of its code * scale`, computed in float32 with one
rounding. In all formats of GGUF that have minimums, number * scale has at most 24 bits, so the
result equals the format's own rule to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch

Tables = tuple[torch.Tensor, ...]
"""Numbers, scales and, if there are any, minimums, as `Quantized` has them."""

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The codes of MXFP4 and NVFP4 are floats of 4 bits: twice their values."""

INT4, INT8 = (*range(8), *range(-8, 0)), (*range(128), *range(-128, 0))
"""Codes that are signed numbers, in two's complement."""

E4M3 = (*torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().tolist(),)
"""The codes of FP8 weights are floats of 8 bits; 127 and 255 are no numbers."""

_WEIGHTS_AT_ONCE = 1 << 21  # intermediate results of decoding stay in the caches


class Quantized:
    """A weight [out, in] whose rows are cut into blocks of 16 or 32 numbers.

    Attributes:
        numbers: uint8 [out, in], below 16 where `bits` is 4; with `levels`, indices into these.
        scales: float32 [out, in / block].
        minimums: float32 [out, in / block], what a number of 0 stands for; None with `levels`.
        bits: 4 or 8.
        block: numbers that share a scale.
        levels: the values of codes, if the numbers are such: `INT4` or up to 16 others, or of 8
            bits `INT8` or `E4M3`; else empty.
    """

    levels: tuple[float, ...] = ()

    def __init__(
        self,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor | None,
        bits: int,
        levels: tuple[float, ...] = (),
    ) -> None:
        if bool(levels) != (minimums is None):
            raise ValueError("a weight has minimums, or levels")
        self._tables = (numbers, scales) if minimums is None else (numbers, scales, minimums)
        self.bits, self.levels = bits, levels
        self.block = numbers.shape[1] // scales.shape[1]
        self.shape = cast(tuple[int, int], tuple(numbers.shape))

    @property
    def format(self) -> tuple[int, int, tuple[float, ...]]:
        """Bits, block and levels: weights of one format can be joined."""
        return self.bits, self.block, self.levels

    @property
    def whole(self) -> bool:
        """Whether its levels, if any, are whole numbers of 8 bits: those that rounded rows meet."""
        return all(isinstance(level, int) and -128 <= level < 128 for level in self.levels)

    def tables(self) -> Tables:
        return self._tables

    def _of(self, tables: Iterable[torch.Tensor]) -> Quantized:
        """A weight of this format."""
        numbers, scales, *minimums = tables
        least = minimums[0] if minimums else None
        return Quantized(numbers, scales, least, self.bits, self.levels)

    def to(self, device: torch.device) -> Quantized:
        """Its tables on a device."""
        return self._of(table.to(device) for table in self.tables())

    def rows(self, ids: torch.Tensor) -> Quantized:
        """The rows with these numbers."""
        return self._of(table[ids] for table in self.tables())

    def columns(self, ids: torch.Tensor) -> Quantized | None:
        """The columns [in] with these numbers; None if blocks would be cut."""
        blocks = ids[:: self.block] // self.block
        whole = (blocks[:, None] * self.block + torch.arange(self.block)).flatten()
        if not torch.equal(ids, whole):
            return None
        numbers, *others = self.tables()
        return self._of([numbers[:, ids], *(table[:, blocks] for table in others)])

    @staticmethod
    def join(parts: Sequence[Quantized]) -> Quantized:
        """Stack weights of one format along their rows."""
        if len(parts) == 1:
            return parts[0]
        stored = [part for part in parts if isinstance(part, Stored)]
        if len(stored) == len(parts):
            return Stored([rows for part in stored for rows in part.parts])
        return parts[0]._of(map(torch.cat, zip(*(x.tables() for x in parts), strict=True)))

    def dense(self) -> torch.Tensor:
        """float32 [out, in]."""
        numbers, scales, *minimums = self.tables()
        blocks = self._values(numbers).unflatten(1, (-1, self.block))
        blocks.mul_(scales[..., None])
        for minimum in minimums:  # one or none; what is added to is exact
            blocks.add_(minimum[..., None])
        return blocks.flatten(1)

    def _values(self, numbers: torch.Tensor) -> torch.Tensor:
        """float32 of numbers, or of the levels of codes."""
        if not self.levels or self.levels == INT8:
            return numbers.view(torch.int8 if self.levels else torch.uint8).float()
        return _levels(self.levels, numbers.device)[numbers.int()]

    def times_rounded(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, out] of rows [T, in] that are rounded to 8 bits, to the bit of rounded.h."""
        numbers, scales, *minimums = self.tables()
        rows, depth = x.shape
        blocks = x.new_zeros(rows, -(-depth // 32) * 32, dtype=torch.float32)
        blocks[:, :depth] = x
        blocks = blocks.unflatten(1, (-1, 32))
        most = blocks.abs().amax(-1, keepdim=True)
        # A plain number over a tensor would be rounded twice: torch inverts the tensor first.
        factors = torch.where(most > 1e-30, torch.full_like(most, 127) / most, torch.zeros(()))
        whole = (blocks * factors).round().flatten(1)[:, :depth].unflatten(1, (-1, self.block))
        row_scales = (most / 127).repeat_interleave(32 // self.block, 1)
        columns = self._values(numbers).unflatten(1, (-1, self.block))
        out = x.new_zeros(rows, len(numbers), dtype=torch.float32)
        for at in range(scales.shape[1]):  # sums of whole numbers below 2^24 are exact
            products = (whole[:, at] @ columns[:, at].T) * scales[:, at]
            for minimum in minimums:
                products += whole[:, at].sum(1, keepdim=True) * minimum[:, at]
            out += products * row_scales[:, at]
        return out


@lru_cache
def _levels(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """On the device already when a CUDA graph is captured, which takes no copies from the host."""
    return torch.tensor(levels, device=device).float()


def e2m1(codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """Floats of 4 bits, uint8 [out, in], times float32 scales [out, in / 16] (NVFP4) or
    [out, in / 32] (MXFP4)."""
    return Quantized(codes, scales / 2, None, 4, E2M1)


def dense(weight: torch.Tensor | Quantized) -> torch.Tensor:
    """A quantized weight as float32; any other as it is."""
    return weight.dense() if isinstance(weight, Quantized) else weight


def dense_rows(weight: torch.Tensor | Quantized, numbers: torch.Tensor) -> torch.Tensor:
    """[T, in] float32, the rows with these numbers."""
    if isinstance(weight, Quantized):
        return weight.rows(numbers).dense()
    return weight[numbers].float()


def join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors by rows: a view where they are adjacent in memory, else a copy."""
    first, address = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage()
    for part in parts:
        inside = part.untyped_storage() is storage and part.is_contiguous()
        if not inside or part.data_ptr() != address:
            return torch.cat(parts)
        address += part.numel() * part.itemsize
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@dataclass(frozen=True)
class Layout:
    """How a format of GGUF stores its blocks.

    Attributes:
        name: the format's.
        decode: from stored blocks [N, bytes] to numbers [N, ...], and scales and minimums
            [N, blocks], or scales alone where there are levels.
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
    levels: tuple[float, ...] = ()


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
        decoded = (_decode(*part) for part in self.parts)
        return tuple(map(torch.cat, zip(*decoded, strict=True)))

    def rows(self, ids: torch.Tensor) -> Quantized:
        if len(self.parts) > 1:
            return super().rows(ids)
        return Stored([(layout, rows[ids]) for layout, rows in self.parts])


def _decode(layout: Layout, rows: torch.Tensor) -> Tables:
    """Decode some blocks at a time."""
    stored, shape = rows.reshape(-1, layout.stored), (len(rows), -1)
    numbers = torch.empty(len(stored), layout.size, dtype=torch.uint8)
    others = torch.empty(1 if layout.levels else 2, len(stored), layout.size // layout.block)
    step = _WEIGHTS_AT_ONCE // layout.size
    for at in range(0, len(stored), step):
        part = slice(at, at + step)
        found, *of_blocks = layout.decode(stored[part])
        numbers[part] = found.view(-1, layout.size)
        for table, values in zip(others, of_blocks, strict=True):
            table[part] = values
    return numbers.view(shape), *(table.view(shape) for table in others)
