"""What a model of names cannot judge of the radix cache, and each rule once as an example."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from radixcache import (
    HashBlockCache,
    LeaseError,
    NoCache,
    PagePool,
    PrefixCache,
    RadixCache,
    RadixCacheError,
)
from radixcache.lease import Lease
from tests.index.drive import append, begin, length, put, snapshot, table

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
"""Ten tokens: at page size 4, two whole pages and a half."""


def a_cache(page_size: int = 4, num_pages: int = 16) -> RadixCache:
    return RadixCache(PagePool(num_pages, page_size))


# -- what is found ---------------------------------------------------------------------------------


def test_what_follows_a_prefix_is_read_along_the_branch_added_last() -> None:
    cache = a_cache()

    def follow(tokens: Sequence[int], count: int = 9) -> tuple[int, list[int]]:
        length, following = cache.follow(tokens, None, count)
        return length, following[0].tolist() if following else []

    assert follow([1, 2]) == (0, [])
    for tokens in ([1, 2, 3, 4], [1, 2, 6, 6, 6], [1, 2, 5]):
        put(cache, tokens)
    assert follow([]) == (0, [1, 2, 5])
    assert follow([1]) == (1, [2, 5])
    assert follow([1, 2, 6, 6, 7]) == (4, [6])
    assert follow([1, 2, 6, 6, 6]) == (5, [])
    put(cache, [1, 2, 3, 4])  # used again, and split: neither makes a branch younger
    put(cache, [1, 2, 3, 8])
    assert follow([1, 2]) == (2, [5])
    assert follow([1, 2, 3]) == (3, [8])
    assert follow([1, 2, 6], count=1) == (3, [6])
    assert follow([1, 2], count=0) == (2, [])
    many = [[branch.tolist() for branch in cache.follow([1, 2], None, 3, n)[1]] for n in (2, 9)]
    assert many == [[[5], [6, 6, 6]], [[5], [6, 6, 6], [3, 8], [3, 4]]]
    assert cache.follow([1, 2], "tenant")[0] == 0


def test_arrays_are_copied_and_of_any_integers() -> None:
    cache, tokens = a_cache(), np.array(SYSTEM, dtype=np.int32)
    put(cache, tokens)  # type: ignore[arg-type]
    tokens[:] = 77
    cache.check()
    assert cache.match(SYSTEM) == cache.match(np.array(SYSTEM, dtype=np.int64)) == 9


# -- pages -----------------------------------------------------------------------------------------


def test_an_append_in_place_when_nobody_wrote_past() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    first = table(cache, SYSTEM)
    lease = cache.acquire([*SYSTEM, 11, 12])
    assert append(cache, lease, [11, 12]) == []
    assert lease.page_table.tolist() == first


def test_of_two_that_append_to_one_page_the_second_copies() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    first = table(cache, SYSTEM)
    one, two = cache.acquire([*SYSTEM, 11]), cache.acquire([*SYSTEM, 21])
    cache.reserve(one, 11)
    cache.reserve(two, 11)
    cache.publish(two, [21])
    cache.publish(one, [11])
    copies = one.take_copies() + two.take_copies()
    assert [(copy.source, copy.num_slots) for copy in copies] == [(first[2], 2)]
    assert {int(one.page_table[2]), int(two.page_table[2])} == {first[2], copies[0].target}


def test_a_loaded_page_is_not_copied_into() -> None:
    """Its branch is written at once, so the page before it may be evicted before the copy."""
    cache = a_cache()
    put(cache, [*SYSTEM, 11])
    lease = cache.acquire([*SYSTEM, 21, 22, 23])
    cache.reserve(lease, 12)
    cache.load(lease, [21, 22])
    assert lease.num_tokens == 12 and lease.take_copies() == []


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_short_leaf_takes_at_most_22_bytes_a_token_beside_its_tokens_and_pages(
    page_size: int,
) -> None:
    leaves, length, below = 500, 32, 1008
    tokens = np.random.default_rng(0).integers(0, 128_000, below + leaves * length, np.int32)
    stem, *tails = np.split(tokens, range(below, len(tokens), length))
    prompts = [np.concatenate((stem, tail)).tolist() for tail in tails]
    cache = a_cache(page_size, len(tokens) // page_size + 1)
    put(cache, prompts.pop())
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for prompt in prompts:
            lease = begin(cache, prompt)
            cache.commit()
            cache.release(lease)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.stats.evicted_pages == 0
    assert taken / len(prompts) / length < 22 + 4 + 4 / page_size


# -- failed steps ----------------------------------------------------------------------------------


def test_rollback_keeps_the_page_that_alone_holds_what_was_written() -> None:
    cache = a_cache()
    late = cache.acquire([1, 2, 3])
    cache.reserve(late, 3)
    put(cache, [1])
    written = table(cache, [1])
    cache.publish(late, [1, 2])  # its own page is the deeper one now, and not written yet
    cache.rollback()
    cache.check()
    assert length(cache, [1]) == 1 and table(cache, [1]) == written


def test_a_page_in_flight_never_replaces_one_that_is_written() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    put(cache, [*SYSTEM, 11])
    written = table(cache, SYSTEM)
    lease = begin(cache, [*SYSTEM, 21, 22])
    cache.evict(1)  # the sibling that stood in the way of a merge goes
    cache.rollback()
    cache.check()
    assert table(cache, SYSTEM) == written == lease.page_table.tolist()


def test_what_was_split_and_merged_again_in_a_step_is_still_in_flight() -> None:
    cache = a_cache(page_size=1, num_pages=10)
    put(cache, [20, 21])
    lease = begin(cache, [1, 2, 3, 4, 5, 6])
    other = cache.acquire([1, 2, 3, 9, 9, 9])
    cache.reserve(other, 6)  # evicts, and so cuts the node where it stands
    cache.release(other)
    cache.rollback()
    cache.check()
    assert lease.num_tokens == 0 == cache.cached_length([1, 2, 3, 4, 5, 6])


# -- eviction --------------------------------------------------------------------------------------


def test_a_request_in_many_chunks_is_one_node() -> None:
    cache = a_cache(num_pages=100)
    lease = cache.acquire(range(90))
    for end in range(3, 90, 3):
        append(cache, lease, range(end - 3, end))
    cache.release(lease)
    (root,) = snapshot(cache).values()
    assert [node.num_tokens for node in root.children] == [87]


# -- pins, statistics, events ----------------------------------------------------------------------


def test_a_listener_that_is_refused_a_change_leaves_the_cache_broken() -> None:
    cache = a_cache(num_pages=6)
    put(cache, SYSTEM)
    begin(cache, [*SYSTEM[:5], 21])  # its step fails, and of the rollback the listener hears first

    def meddle(event: object) -> None:
        cache.evict(1)

    cache.events.append(meddle)
    with pytest.raises(RuntimeError, match="a listener of the cache failed") as failure:
        cache.rollback()
    assert not isinstance(failure.value, RadixCacheError)
    assert cache.broken
    cache.events.clear()
    cache.recover()
    cache.check()
    assert cache.pool.num_free == 6


@pytest.mark.parametrize("seed", range(40))
def test_what_a_lease_discards_goes_up_to_where_another_text_stands_or_branches(seed) -> None:
    rng, cache = random.Random(seed), a_cache([1, 3, 4][seed % 3], 900)
    kept, running = list[list[int]](), list[tuple[Lease, list[int]]]()
    for _ in range(60):
        running.append((begin(cache, text := rng.choices([0, 1], k=rng.randint(1, 12))), text))
        cache.commit()
        if rng.random() < 0.8:
            lease, text = running.pop(rng.randrange(len(running)))
            cache.release(lease, discard=(discard := rng.random() < 0.5))
            kept.append(text)
            if discard:
                kept = [one for one in kept if one != text[: len(one)]]
        cache.check()
        there = {tuple(one[:end]) for one in [*kept, *(t for _, t in running)] for end in range(13)}
        for probe in [tuple(text), *product([0, 1], repeat=6)]:
            longest = max(n for n in range(len(probe) + 1) if not n or probe[:n] in there)
            assert cache.cached_length(probe) == longest


# -- leases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RadixCache, HashBlockCache, NoCache])
def test_misuse_of_a_lease_is_refused(kind: Callable[[PagePool], PrefixCache]) -> None:
    cache, other = kind(PagePool(16, 4)), kind(PagePool(16, 4))
    lease = cache.acquire(SYSTEM)
    with pytest.raises(LeaseError, match="belongs to another cache"):
        other.reserve(lease, 10)
    with pytest.raises(LeaseError, match="needs a reserve of 1, the lease holds 0"):
        cache.publish(lease, [1])
    cache.reserve(lease, 10)
    with pytest.raises(LeaseError, match="at least one token"):
        cache.publish(lease, [])
    cache.publish(lease, SYSTEM[:5])
    with pytest.raises(LeaseError, match="once per step"):
        cache.publish(lease, SYSTEM[5:])
    with pytest.raises(LeaseError, match="in flight"):
        cache.release(lease)
    cache.commit()
    with pytest.raises(LeaseError, match="before a reset, release 1 lease"):
        cache.reset()
    cache.release(lease)
    for misuse in (
        lambda: cache.release(lease),
        lambda: cache.reserve(lease, 4),
        lambda: cache.publish(lease, [1]),
    ):
        with pytest.raises(LeaseError, match="released"):
            misuse()
    cache.check()
