"""Decodes the kinds of GGUF whose weights stand in grids: IQ1, IQ2 and IQ3.

A stored index names 4 or 8 weights at once, a row of a grid, whose values are few; their signs are
stored beside. A code here is the number of a value, and 8 more of the value below 0 (of IQ1, of the
values a quarter lower). The grids are those of the package gguf.
"""

from __future__ import annotations

from functools import cache

import torch

from radixcache.kernels.quantized import Tables
from radixcache.runtime.model.gguf.fields import half, in_turn, words


def _both_signs(*values: int) -> tuple[int, ...]:
    return *values, *[0] * (8 - len(values)), *(-value for value in values)


# Levels, in the order of the grids' values. IQ1's are values of -1, 0, 1, up or down by an eighth.
OF_IQ1 = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7)
OF_IQ2 = _both_signs(8, 25, 43)
OF_IQ3_XXS = _both_signs(4, 12, 20, 28, 36, 44, 52, 62)
OF_IQ3_S = _both_signs(1, 3, 5, 7, 9, 11, 13, 15)


@cache
def _signs() -> torch.Tensor:
    """int64 [256]: for each byte, 8 bytes that are 8 where a bit is set, the lowest bit first."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (8 * bits).to(torch.uint8).view(torch.int64).flatten()


@cache
def _evened() -> torch.Tensor:
    """uint8 [128]: 7 bits, and an eighth that makes their number even."""
    ids = torch.arange(128)
    odd = (ids[:, None] >> torch.arange(7)).sum(1) & 1
    return (ids | odd << 7).to(torch.uint8)


@cache
def _grid(kind: str) -> torch.Tensor:
    """A grid's rows of 4 or 8 codes, as int32 or int64."""
    from gguf import quants

    found = getattr(quants, kind)
    found.init_grid()
    values = torch.tensor(found.grid_map).float()
    codes = torch.searchsorted(values, torch.from_numpy(found.grid[0, 0]))
    wide = torch.int32 if codes.shape[1] == 4 else torch.int64
    return codes.to(torch.uint8).view(wide).flatten()


def _codes(kind: str, ids: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """uint8 codes [N, 256] of rows of a grid, and of bytes of 8 signs [N, 32]."""
    codes = _grid(kind)[ids.int()].view(torch.uint8)
    return codes | _signs()[signs.int()].view(torch.uint8)


def _four_signs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of signs [N, 4 W], of 7 bits each in words [N, W], and the 4 bits above them."""
    ids = packed[..., None] >> torch.arange(0, 28, 7) & 127
    return _evened()[ids].flatten(1), packed >> 28 & 15


def iq2_xxs(stored: torch.Tensor) -> Tables:
    groups = stored[:, 2:66].unflatten(1, (8, 8))
    signs, scales = _four_signs(words(groups[:, :, 4:].flatten(1), torch.int32))
    codes = _codes("IQ2_XXS", groups[:, :, :4].flatten(1), signs)
    return codes, half(stored, 0) * (0.5 + scales) / 4


def iq2_xs(stored: torch.Tensor) -> Tables:
    packed = words(stored[:, 2:66])
    codes = _codes("IQ2_XS", packed & 511, _evened()[packed >> 9])
    return codes, half(stored, 0) * (0.5 + in_turn(stored[:, 66:74], 4)) / 4


def iq2_s(stored: torch.Tensor) -> Tables:
    ids = stored[:, 2:34] | in_turn(stored[:, 66:74], 2).int() << 8
    codes = _codes("IQ2_S", ids, stored[:, 34:66])
    return codes, half(stored, 0) * (0.5 + in_turn(stored[:, 74:82], 4)) / 4


def iq3_xxs(stored: torch.Tensor) -> Tables:
    signs, scales = _four_signs(words(stored[:, 66:98], torch.int32))
    return _codes("IQ3_XXS", stored[:, 2:66], signs), half(stored, 0) * (0.5 + scales) / 2


def iq3_s(stored: torch.Tensor) -> Tables:
    ids = stored[:, 2:66] | in_turn(stored[:, 66:74], 1).int() << 8
    codes = _codes("IQ3_S", ids, stored[:, 74:106])
    return codes, half(stored, 0) * (1 + 2 * in_turn(stored[:, 106:110], 4))


def iq1_s(stored: torch.Tensor) -> Tables:
    packed = words(stored[:, 34:50])
    high = (packed[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)
    lower = 255 * (packed >> 15).repeat_interleave(4, 1)
    codes = _codes("IQ1_S", stored[:, 2:34] | high << 8, lower)
    return codes, half(stored, 0) * (2 * (packed >> 12 & 7) + 1) / 8


def iq1_m(stored: torch.Tensor) -> Tables:
    """The bits of the float16 that scales all lie above the others' in four words."""
    packed, high = words(stored[:, 48:56]), in_turn(stored[:, 32:48], 4)
    codes = _codes("IQ1_M", stored[:, :32] | (high & 7).int() << 8, 255 * (high >> 3))
    above = (packed >> 12 << torch.arange(0, 16, 4)).sum(1, keepdim=True, dtype=torch.int32)
    scale = above.to(torch.int16).view(torch.float16).float()
    scales = (packed[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)
    return codes, scale * (2 * scales + 1) / 8
