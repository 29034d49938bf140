"""A ghost index forgets as a cache does, and survives a call cut off."""

from __future__ import annotations

import random

import pytest

from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.radix.ghost import GhostIndex


@pytest.mark.parametrize("seed", range(3))
def test_it_knows_what_a_cache_knows_that_computed_the_same(seed: int) -> None:
    rng = random.Random(seed)
    size = 40
    ghost, cache = GhostIndex(size), RadixCache(PagePool(size, page_size=1))
    for _ in range(300):
        text, salt = rng.choices(range(3), k=rng.randrange(1, 60)), rng.choice([None, "a"])
        ghost.remember(text, salt)
        text = text[:size]
        lease = cache.acquire(text, salt, include_last=True)
        if new := text[lease.num_tokens :]:
            cache.reserve(lease, len(text))
            cache.publish(lease, new, written=True)
        else:
            cache.touch(lease)
        cache.release(lease)
        ghost.check()
        probe = rng.choices(range(3), k=30)
        for name in (None, "a"):
            assert ghost.match(probe, name) == cache.match(probe, name)
        assert ghost.cached_length(text, salt) == len(text)
        assert ghost.pool.num_free == cache.pool.num_free


def test_after_a_call_that_was_cut_off_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = GhostIndex(num_tokens=10)
    ghost.remember([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(ghost.pool, "allocate", lambda count: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ghost.remember([1, 2, 4, 5])
    ghost.remember([1, 2, 4])
    assert ghost.match([1, 2, 4, 9]) == 3
    ghost.check()
    assert ghost.idle
