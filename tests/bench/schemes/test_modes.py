"""The schemes by name, what they evict, and the memory they get."""

from __future__ import annotations

import numpy as np
import pytest

from radixcache.bench.schemes.modes import DEFAULT_MODES, Memory, parse_memory, parse_mode


def test_every_default_mode_is_one():
    assert [parse_mode(name).name for name in DEFAULT_MODES] == list(DEFAULT_MODES)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("50%", 512), ("600", 512), ("4096B", 512), ("8KiB", 512), ("8.2kB", 512), ("1%", 512)],
)
def test_memory_is_cut_to_whole_pages_of_every_mode(text, tokens):
    modes = [parse_mode("hash-256"), parse_mode("radix-1"), parse_mode("hash-16")]
    memory = parse_memory(text)
    assert isinstance(memory, Memory)
    assert memory.tokens(1100, 16, modes) == tokens


@pytest.mark.parametrize("by", ["evict", "reserve"])
@pytest.mark.parametrize(("mode", "left"), [("radix-4", 12), ("aligned-4", 12), ("whole-4", 0)])
def test_a_leaf_is_trimmed_page_by_page_or_dropped_whole(mode, left, by):
    cache = parse_mode(mode).make(64 if by == "evict" else 16)
    tokens = np.arange(16, dtype=np.int32)
    lease = cache.acquire(tokens)
    cache.reserve(lease, 16)
    cache.publish(lease, tokens)
    cache.commit()
    cache.release(lease)
    if by == "evict":
        assert cache.evict(1) == 4 - left // 4
    else:
        cache.reserve(cache.acquire(tokens[::-1].copy()), 1)
        assert cache.stats.evicted_pages == 4 - left // 4
    assert cache.match(np.append(tokens, 99)) == left
    cache.check()
