"""The schemes by name, what they evict, and the memory they get."""

from __future__ import annotations

import numpy as np
import pytest

from radixcache.bench.schemes.named import GROUPS, Memory, find_schemes, parse_memory, parse_scheme


def test_a_scheme_that_is_named_twice_is_taken_once():
    names = [scheme.name for scheme in find_schemes(["radix-1", "whole-4", "default", "radix-1"])]
    assert names == ["radix-1", "whole-4", *(n for n in GROUPS["default"] if n != "radix-1")]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("50%", 512), ("600", 512), ("4096B", 512), ("8KiB", 512), ("8.2kB", 512), ("1%", 512)],
)
def test_memory_is_cut_to_whole_pages_of_every_scheme(text, tokens):
    schemes = [parse_scheme("hash-256"), parse_scheme("radix-1"), parse_scheme("hash-16")]
    memory = parse_memory(text)
    assert isinstance(memory, Memory)
    assert memory.tokens(1100, 16, schemes) == tokens


@pytest.mark.parametrize("by", ["evict", "reserve"])
@pytest.mark.parametrize(("scheme", "left"), [("radix-4", 12), ("aligned-4", 12), ("whole-4", 0)])
def test_a_leaf_is_trimmed_page_by_page_or_dropped_whole(scheme, left, by):
    cache = parse_scheme(scheme).make(64 if by == "evict" else 16)
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
