"""Huge pages are advice: whatever lies in the memory stays. What is free goes back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from radixcache.kernels.huge_pages import HUGE, use_huge_pages
from radixcache.runtime.model.host.system_memory import give_back


def test_contents_stay_and_no_more_than_the_blocks_moves() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 255, size, dtype=np.uint8) for size in (100, HUGE, 9 * HUGE)]
    copies = [array.copy() for array in arrays]
    moved = use_huge_pages((array.ctypes.data, array.nbytes) for array in arrays)
    assert moved % HUGE == 0 and moved <= sum(array.nbytes for array in arrays) + HUGE
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc only")
def test_what_is_free_between_what_is_not_goes_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [bytes(b"x" * 50_000) for _ in range(1000)]
    del blocks[:-1]  # the last holds the end of the heap
    before = resident()
    give_back()
    assert before - resident() > 20_000_000, len(blocks)
