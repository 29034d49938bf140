"""Unpacks fields of bits out of stored blocks [N, bytes] of a GGUF file."""

from __future__ import annotations

import torch


def half(stored: torch.Tensor, at: int) -> torch.Tensor:
    """float32 [N, 1] of the float16 that begins at a byte of each block."""
    return stored[:, at : at + 2].contiguous().view(torch.float16).float()


def words(stored: torch.Tensor, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """int32 of the words of that dtype, whose bits count from 0 if they are int16."""
    found = stored.contiguous().view(dtype).int()
    return found & 0xFFFF if dtype == torch.int16 else found


def fields(stored: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Unpack fields of `bits`: [N, bytes / group, 8 / bits, group], lowest bits first."""
    count, mask = 8 // bits, (1 << bits) - 1
    groups = stored.unflatten(1, (-1, group))
    found = stored.new_empty(len(stored), groups.shape[1], count, group)
    for field in range(count):
        out = found[:, :, field]
        if field < count - 1:
            torch.bitwise_and(groups >> (bits * field) if field else groups, mask, out=out)
        else:
            torch.bitwise_right_shift(groups, bits * field, out=out)
    return found


def in_turn(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack fields of `bits` byte by byte: [N, bytes * 8 / bits], lowest bits first."""
    return fields(stored, bits, 1).flatten(1)
