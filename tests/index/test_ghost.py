"""A ghost index forgets as a list of what was told last does, and survives a call cut off."""

from __future__ import annotations

import random

import pytest

from radixcache.ghost import GhostIndex
from radixcache.pages import PagePool
from radixcache.radix import RadixCache


def _common(one: list[int], other: list[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


@pytest.mark.parametrize("seed", range(3))
def test_with_room_for_all_the_longest_common_prefix_of_a_salt_is_known(seed: int) -> None:
    rng = random.Random(seed)
    ghost = GhostIndex(num_tokens=4_000)
    told: dict[str | None, list[list[int]]] = {None: [], "a": []}
    for _ in range(200):
        text, salt = rng.choices(range(3), k=rng.randrange(12)), rng.choice([None, "a"])
        expected = max((_common(text, other) for other in told[salt]), default=0)
        assert ghost.match([*text, 9], salt) == expected  # the last token of a prompt is no hit
        ghost.remember(text, salt)
        told[salt].append(text)
        ghost.check()


@pytest.mark.parametrize("seed", range(3))
def test_what_was_told_last_is_known_however_small_it_is(seed: int) -> None:
    rng = random.Random(seed)
    ghost = GhostIndex(num_tokens=10)
    for _ in range(100):
        text = rng.choices(range(5), k=rng.randrange(30))
        ghost.remember(text)
        assert ghost.match([*text, 9]) == min(len(text), 10)
        ghost.check()


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


@pytest.mark.parametrize("seed", range(3))
def test_it_knows_what_a_cache_knows_that_computed_the_same(seed: int) -> None:
    rng = random.Random(seed)
    size = 40
    ghost, cache = GhostIndex(size), RadixCache(PagePool(size, page_size=1))
    for _ in range(300):
        text, salt = rng.choices(range(3), k=rng.randrange(1, 30)), rng.choice([None, "a"])
        ghost.remember(text, salt)
        lease = cache.acquire(text, salt, include_last=True)
        cache.reserve(lease, len(text))
        cache.publish(lease, text[lease.num_tokens :], written=True)
        cache.release(lease)
        ghost.check()
        probe = rng.choices(range(3), k=30)
        for name in (None, "a"):
            assert ghost.match(probe, name) == cache.match(probe, name)
        assert ghost.cached_length(text, salt) == len(text)
        assert ghost.pool.num_free == cache.pool.num_free
