"""Huge pages of memory: a forward pass over one token reads every weight once.

From hundreds of megabytes of pages of 4 KiB, looking up where those pages are takes an eighth of
the time (measured on x86-64).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, from Linux 6.1; older kernels do it in their own time


def use_huge_pages(blocks: Iterable[tuple[int, int]]) -> int:
    """Ask for huge pages under blocks of memory in use; returns the bytes that have them now.

    Blocks that lie next to each other are taken together, with what is between them. It is only
    advice: where it is not followed, nothing changes.

    Args:
        blocks: (address, bytes) of each.
    """
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    madvise, moved = _madvise(), 0
    for start, end in _merge(blocks):
        first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if first < last and not madvise(first, last - first, mmap.MADV_HUGEPAGE):
            moved += 0 if madvise(first, last - first, _COLLAPSE) else last - first
    return moved


def use_small_pages(address: int, size: int) -> None:
    """Ask for small pages only, in a block of memory that is not written to yet."""
    if sys.platform == "linux" and hasattr(mmap, "MADV_NOHUGEPAGE"):
        first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
        _madvise()(first, (end - first) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_NOHUGEPAGE)


def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def _merge(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of stretches with gaps of less than a huge page, in order."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(blocks):
        end = start + size
        if merged and start - merged[-1][1] < HUGE:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
