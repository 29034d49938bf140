"""What the radix cache promises, one example for each fact."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import numpy as np
import pytest

from radixcache import (
    HashBlockCache,
    InvalidRequest,
    Lease,
    LeaseError,
    NoCache,
    OutOfPages,
    PageCopy,
    PagePool,
    PinError,
    PrefixCache,
    RadixCache,
    RadixCacheError,
)
from radixcache.events import Cleared, Evicted, Stored
from tests.index.reference import SENTINEL, Replay, chain_of

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
"""Ten tokens: at page size 4, two whole pages and a half."""


def a_cache(page_size: int = 4, num_pages: int = 16) -> RadixCache:
    return RadixCache(PagePool(num_pages, page_size))


def begin(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> Lease:
    """A lease on all of `tokens`; what was not found is in flight."""
    lease = cache.acquire(tokens, namespace)
    cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens[lease.num_tokens :])
    return lease


def append(cache: PrefixCache, lease: Lease, tokens: Sequence[int]) -> list[PageCopy]:
    """One step that writes `tokens` for `lease` alone; the copies it needed."""
    cache.reserve(lease, lease.num_tokens + len(tokens))
    cache.publish(lease, tokens)
    copies = lease.take_copies()
    cache.commit()
    return copies


def put(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> int:
    """One whole request; how many of its tokens were found."""
    lease = begin(cache, tokens, namespace)
    hit = lease.cached_tokens
    lease.take_copies()
    cache.commit()
    cache.release(lease)
    return hit


def length(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> int:
    """How much of `tokens` is cached, the last token included."""
    return cache.match([*tokens, SENTINEL], namespace)


def table(cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    """The pages of the cached prefix of `tokens`."""
    lease = cache.acquire([*tokens, SENTINEL])
    pages = lease.page_table.tolist()
    cache.release(lease)
    return pages


# ------------------------------------------------------------------------------ what is found


@pytest.mark.parametrize("page_size", [1, 4, 5, 16])
def test_who_has_the_logits_of_the_last_token_hits_that_one_too(page_size: int) -> None:
    cache = a_cache(page_size)
    put(cache, [*SYSTEM, 11])
    assert cache.match(SYSTEM) == 9
    for include_last, hit in ((False, 9), (True, 10)):
        lease = cache.acquire(SYSTEM, include_last=include_last)
        assert lease.num_tokens == lease.cached_tokens == lease.capacity == hit
        cache.release(lease)
    lease = cache.acquire([*SYSTEM, 12], include_last=True)  # not all of it is cached
    assert lease.num_tokens == 10
    cache.release(lease)
    lease = cache.acquire(SYSTEM, "another's", include_last=True)
    assert lease.num_tokens == 0
    cache.release(lease)
    cache.check()


def test_what_is_in_flight_is_no_hit_of_the_whole() -> None:
    cache = a_cache(page_size=5)
    lease = begin(cache, SYSTEM)
    early = cache.acquire(SYSTEM, include_last=True)
    assert (early.num_tokens, early.next_step_tokens) == (5, 4)
    with pytest.raises(LeaseError):
        cache.publish(early, [], written=True)
    cache.commit()
    late = cache.acquire(SYSTEM, include_last=True)
    assert (late.num_tokens, late.next_step_tokens) == (10, 0)
    cache.check()
    for one in (lease, early, late):
        cache.release(one)
    cache.check()


def test_what_follows_a_hit_of_the_whole_goes_into_a_copy_of_the_page_in_which_it_ends() -> None:
    cache = a_cache()
    put(cache, [*SYSTEM, 11])
    lease = cache.acquire(SYSTEM, include_last=True)
    last = lease.page_table.tolist()[-1]
    copies = append(cache, lease, [12])
    assert copies == [PageCopy(last, lease.page_table.tolist()[-1], 2)]
    assert length(cache, [*SYSTEM, 11]) == length(cache, [*SYSTEM, 12]) == 11
    cache.release(lease)
    cache.check()


def test_a_hit_of_the_whole_counts_and_is_used_once_nothing_is_published() -> None:
    cache = a_cache(page_size=1, num_pages=20)
    put(cache, SYSTEM)
    put(cache, [20, 21, 22])
    before = (cache.stats.requests, cache.stats.query_tokens, cache.stats.hit_tokens)
    lease = cache.acquire(SYSTEM, include_last=True)
    cache.publish(lease, [], written=True)
    cache.publish(lease, [], written=True)
    after = (cache.stats.requests, cache.stats.query_tokens, cache.stats.hit_tokens)
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (1, 10, 10)
    cache.release(lease)
    cache.evict(3)  # what was used before it
    assert length(cache, SYSTEM) == 10 and length(cache, [20, 21, 22]) == 0
    cache.check()


@pytest.mark.parametrize("kind", [HashBlockCache, NoCache])
def test_the_other_caches_leave_the_last_token_to_be_computed(
    kind: type[HashBlockCache] | type[NoCache],
) -> None:
    cache = kind(PagePool(16, 4))
    put(cache, SYSTEM[:8])
    lease = cache.acquire(SYSTEM[:8], include_last=True)
    assert not kind.full_prompt_hits
    assert lease.num_tokens == (4 if kind is HashBlockCache else 0)
    cache.release(lease)
    cache.check()


def test_a_hit_ends_at_any_token_not_only_at_page_ends() -> None:
    cache = a_cache(page_size=16)
    put(cache, SYSTEM)
    assert [cache.match([*SYSTEM[:n], SENTINEL]) for n in range(11)] == list(range(11))


def test_a_hit_leaves_one_token_to_compute() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    assert cache.match(SYSTEM) == 9
    lease = cache.acquire(SYSTEM)
    assert (lease.num_tokens, lease.cached_tokens) == (9, 9)


def test_lists_and_arrays_are_the_same_tokens() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    assert cache.match(SYSTEM) == cache.match(np.array(SYSTEM, dtype=np.int32)) == 9
    assert cache.match(np.array(SYSTEM, dtype=np.int64)) == 9


def test_later_changes_to_the_callers_array_do_not_reach_the_cache() -> None:
    cache = a_cache()
    tokens = np.array(SYSTEM, dtype=np.int32)
    lease = cache.acquire(tokens)
    cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens)
    tokens[:] = 77
    cache.commit()
    cache.release(lease)
    cache.check()
    assert length(cache, SYSTEM) == 10


def test_nothing_is_found_in_another_namespace() -> None:
    cache = a_cache()
    put(cache, SYSTEM, "a")
    assert length(cache, SYSTEM, "a") == 10
    assert length(cache, SYSTEM, "b") == length(cache, SYSTEM) == 0
    assert put(cache, SYSTEM, "b") == 0
    assert cache.pool.num_free == 16 - 2 * 3, "the namespaces share no page"


def test_lookups_change_nothing() -> None:
    cache = a_cache(page_size=1, num_pages=8)
    put(cache, [1, 2, 3])
    put(cache, [4, 5, 6])
    stats, refs = vars(cache.stats).copy(), np.asarray(cache.pool.refs).copy()
    for _ in range(3):
        assert cache.match([1, 2, 9]) == 2
        lease = cache.acquire([1, 2, 3, 9])
        assert lease.num_tokens == 3
        cache.release(lease)
    assert vars(cache.stats) == stats
    assert np.array_equal(cache.pool.refs, refs)
    cache.evict(1)
    assert (length(cache, [1, 2, 3]), length(cache, [4, 5, 6])) == (2, 3), "1 2 3 is still oldest"


# ------------------------------------------------------------------------------ pages


def test_the_table_covers_the_hit_and_grows_by_whole_pages() -> None:
    cache = a_cache()
    lease = cache.acquire(SYSTEM)
    assert lease.page_table.dtype == np.int32 and lease.page_table.shape == (0,)
    cache.reserve(lease, 5)
    assert lease.page_table.shape == (2,)
    cache.reserve(lease, 8)
    assert lease.page_table.shape == (2,), "room for 8 is there already"
    assert cache.pool.num_free == 14


def test_a_hit_in_mid_page_copies_only_that_page() -> None:
    cache = a_cache()
    put(cache, [*SYSTEM, 11, 12])
    first = table(cache, [*SYSTEM, 11, 12])
    lease = begin(cache, [*SYSTEM, 21, 22])
    assert lease.cached_tokens == 10
    assert lease.page_table.tolist()[:2] == first[:2], "whole pages are shared"
    assert lease.page_table[2] != first[2]
    assert lease.take_copies() == [PageCopy(first[2], int(lease.page_table[2]), 2)]
    assert lease.take_copies() == [], "they are taken once"
    assert cache.stats.copied_pages == 1
    assert cache.pool.num_free == 16 - 4


def test_an_append_in_place_when_nobody_wrote_past() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    first = table(cache, SYSTEM)
    lease = cache.acquire([*SYSTEM, 11, 12])
    assert append(cache, lease, [11, 12]) == []
    assert lease.page_table.tolist() == first
    assert cache.pool.num_free == 16 - 3


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
    assert one.page_table[2] != two.page_table[2]
    assert {int(one.page_table[2]), int(two.page_table[2])} == {first[2], copies[0].target}


def test_a_split_in_mid_page_keeps_both_halves() -> None:
    cache = a_cache()
    put(cache, [*SYSTEM, 11, 12, 13])
    whole = table(cache, [*SYSTEM, 11, 12, 13])
    put(cache, [*SYSTEM, 21])
    cache.check()
    assert table(cache, [*SYSTEM, 11, 12, 13]) == whole, "a split moves no page"
    assert table(cache, SYSTEM) == whole[:3]
    assert table(cache, [*SYSTEM, 21])[:2] == whole[:2]
    assert cache.pool.num_free == 16 - 5
    assert cache.evict(16) == 5, "both halves together held what they hold"


def test_a_mid_page_split_survives_the_eviction_of_either_half() -> None:
    cache = a_cache()
    put(cache, [*SYSTEM, 11, 12])
    put(cache, [*SYSTEM, 21, 22])
    cache.evict(1)
    cache.check()
    assert length(cache, [*SYSTEM, 21, 22]) == 12, "the younger half stays"
    assert length(cache, [*SYSTEM, 11, 12]) == 10


def test_duplicates_are_dropped_and_the_table_repointed() -> None:
    cache = a_cache()
    one, two = cache.acquire(SYSTEM), cache.acquire(SYSTEM)
    for lease in (one, two):
        cache.reserve(lease, 10)
    assert cache.pool.num_free == 16 - 6
    cache.publish(one, SYSTEM)
    cache.publish(two, SYSTEM)
    assert two.page_table.tolist()[:2] == one.page_table.tolist()[:2]
    cache.commit()
    cache.release(one)
    cache.release(two)
    assert cache.pool.num_free == 16 - 3, "the duplicates are free again"


def test_a_duplicate_of_a_cached_prefix_is_freed_in_the_same_call() -> None:
    cache = a_cache()
    late = cache.acquire(SYSTEM)
    cache.reserve(late, 10)
    put(cache, SYSTEM)
    free = cache.pool.num_free
    cache.publish(late, SYSTEM[:8])
    assert cache.pool.num_free == free + 2
    assert late.page_table.tolist()[:2] == table(cache, SYSTEM)[:2]


def test_pages_are_read_root_to_leaf() -> None:
    cache = a_cache(page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6])
    put(cache, [1, 2, 3, 4, 5, 7, 8, 9, 10])
    lease = cache.acquire([1, 2, 3, 4, 5, 7, 8, 9, 10, 11])
    assert lease.num_tokens == 9 and len(set(lease.page_table.tolist())) == 3
    assert lease.page_table[1] != table(cache, [1, 2, 3, 4, 5, 6])[1], "the child overrides"


# ------------------------------------------------------------------------------ in flight


def test_twins_in_one_step_compute_the_stem_once() -> None:
    cache = a_cache(num_pages=64)
    stem = list(range(1, 17))
    leases = [begin(cache, [*stem, 100 + twin]) for twin in range(8)]
    assert [lease.cached_tokens for lease in leases] == [0] + [16] * 7
    assert all(
        lease.page_table.tolist()[:4] == leases[0].page_table.tolist()[:4] for lease in leases
    )
    assert not any(lease.take_copies() for lease in leases)
    assert cache.pool.num_free == 64 - 4 - 8


def test_a_hit_in_flight_is_cut_to_whole_pages() -> None:
    cache = a_cache()
    begin(cache, SYSTEM)
    assert length(cache, SYSTEM) == 8
    cache.commit()
    assert length(cache, SYSTEM) == 10


def test_the_cut_never_goes_below_what_is_written() -> None:
    cache = a_cache()
    put(cache, SYSTEM[:9])
    begin(cache, [*SYSTEM[:9], 11, 12, 13, 14])
    assert cache.match([*SYSTEM[:9], 11, SENTINEL]) == 9, "10 is in flight, 8 is too little"
    assert cache.match([*SYSTEM[:9], 11, 12, 13, SENTINEL]) == 12, "a whole page in flight"
    assert cache.match([*SYSTEM[:9], 11, 12, 13, 14, SENTINEL]) == 12


# ------------------------------------------------------------------------------ rollback


def test_rollback_forgets_only_the_failed_step() -> None:
    cache = a_cache()
    lease = begin(cache, SYSTEM)
    cache.commit()
    free = cache.pool.num_free
    cache.reserve(lease, 14)
    cache.publish(lease, [11, 12, 13, 14])
    other = begin(cache, [31, 32, 33])
    cache.rollback()
    cache.check()
    assert (lease.num_tokens, other.num_tokens) == (10, 0)
    assert (len(lease.page_table), len(other.page_table)) == (3, 0)
    assert length(cache, [*SYSTEM, 11, 12, 13, 14]) == 10
    assert length(cache, [31, 32, 33]) == 0
    assert cache.pool.num_free == free
    assert append(cache, lease, [21, 22]) == [], "the slots are free to be written again"
    assert length(cache, [*SYSTEM, 21, 22]) == 12


def test_rollback_moves_back_those_who_shared_what_failed() -> None:
    cache = a_cache()
    put(cache, SYSTEM[:6])
    one = begin(cache, [*SYSTEM, 11, 12, 13])
    two = cache.acquire([*SYSTEM, 11, 12, 20])
    assert two.num_tokens == 12
    cache.rollback()
    cache.check()
    assert (one.num_tokens, two.num_tokens) == (6, 6)
    assert one.page_table.tolist() == two.page_table.tolist() == table(cache, SYSTEM[:6])
    assert not one.take_copies() and not two.take_copies()


def test_rollback_takes_back_a_copied_page() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    put(cache, [*SYSTEM, 11])
    free = cache.pool.num_free
    lease = begin(cache, [*SYSTEM, 21])
    cache.rollback()
    assert cache.pool.num_free == free
    assert lease.page_table.tolist() == table(cache, SYSTEM)
    assert lease.take_copies() == [], "the copy never ran"
    assert len(append(cache, lease, [21])) == 1, "so it is asked for again"


def test_rollback_keeps_the_page_that_alone_holds_what_was_written() -> None:
    cache = a_cache()
    late = cache.acquire([1, 2, 3])
    cache.reserve(late, 3)
    put(cache, [1])
    written = table(cache, [1])
    cache.publish(late, [1, 2])  # its own page is the deeper one now, and not written yet
    cache.rollback()
    assert length(cache, [1]) == 1 and table(cache, [1]) == written
    cache.check()


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


def test_rollback_returns_pages_in_the_same_order_each_time() -> None:
    def pages_after_rollback() -> list[int]:
        cache = a_cache(page_size=1)
        for token in range(12):
            begin(cache, [token])
        cache.rollback()
        lease = cache.acquire(list(range(16)))
        cache.reserve(lease, 12)
        return lease.page_table.tolist()

    first = pages_after_rollback()
    assert [pages_after_rollback() for _ in range(4)] == [first] * 4


def test_after_commit_there_is_nothing_to_roll_back() -> None:
    cache = a_cache()
    lease = begin(cache, SYSTEM)
    cache.commit()
    cache.rollback()
    assert lease.num_tokens == 10 and length(cache, SYSTEM) == 10


def test_a_lease_publishes_once_per_step() -> None:
    """Its first tokens might stand in the tree with a page that nobody writes."""
    for cache in (a_cache(), NoCache(PagePool(16, 4))):
        lease = cache.acquire(SYSTEM)
        cache.reserve(lease, 10)
        cache.publish(lease, SYSTEM[:5])
        with pytest.raises(LeaseError, match="once per step"):
            cache.publish(lease, SYSTEM[5:])
        cache.commit()
        cache.publish(lease, SYSTEM[5:])
        cache.commit()


def test_a_lease_with_tokens_in_flight_cannot_be_released() -> None:
    cache = a_cache()
    lease = begin(cache, SYSTEM)
    with pytest.raises(LeaseError):
        cache.release(lease)
    assert not lease.released
    cache.rollback()
    cache.release(lease)
    assert lease.released and cache.pool.num_free == 16


# ------------------------------------------------------------------------------ eviction


def test_content_stays_after_release() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    assert length(cache, SYSTEM) == 10 and cache.pool.num_free == 13


def test_release_frees_what_was_reserved_but_not_published() -> None:
    cache = a_cache()
    lease = cache.acquire(SYSTEM)
    cache.reserve(lease, 10)
    cache.release(lease)
    assert cache.pool.num_free == 16


def test_eviction_trims_the_tail_page_by_page_and_never_more_than_asked() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    assert (cache.evict(1), length(cache, SYSTEM)) == (1, 8)
    assert (cache.evict(1), length(cache, SYSTEM)) == (1, 4)
    assert (cache.evict(5), length(cache, SYSTEM)) == (1, 0)
    assert cache.evict(1) == 0
    assert (cache.stats.evicted_pages, cache.stats.evicted_tokens) == (3, 10)


def test_reserve_evicts_only_what_it_is_short_of() -> None:
    cache = a_cache(num_pages=4)
    put(cache, SYSTEM)
    lease = cache.acquire([31, 32, 33, 34, 35])
    cache.reserve(lease, 5)
    assert cache.pool.num_free == 0 and length(cache, SYSTEM) == 8


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = a_cache(num_pages=8)
    for first in (10, 20, 30):
        put(cache, [first, first + 1, first + 2, first + 3])
    assert put(cache, [10, 11, 12, 13, 14]) == 4
    cache.evict(1)
    assert [length(cache, [n, n + 1, n + 2, n + 3]) for n in (10, 20, 30)] == [4, 0, 4]


def test_release_counts_as_use() -> None:
    cache = a_cache(page_size=1)
    old = begin(cache, [1, 2, 3])
    cache.commit()
    put(cache, [4, 5, 6])
    cache.release(old)
    cache.evict(1)
    assert (length(cache, [1, 2, 3]), length(cache, [4, 5, 6])) == (3, 2)


def test_a_stem_outlives_its_branches() -> None:
    cache = a_cache(page_size=1)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6])
    assert cache.evict(4) == 4
    assert length(cache, [1, 2]) == 2


def test_a_released_lease_that_ends_inside_an_edge_uses_its_own_part_only() -> None:
    cache = a_cache(page_size=1)
    put(cache, [1, 2, 3, 4, 5, 6])
    put(cache, [7, 8])
    put(cache, [1, 2, 3])
    cache.evict(3)
    assert length(cache, [1, 2, 3, 4, 5, 6]) == 3, "4 5 6 was used before 7 8"
    assert length(cache, [7, 8]) == 2


def test_leased_paths_survive_any_pressure() -> None:
    cache = a_cache(num_pages=8)
    put(cache, SYSTEM)
    put(cache, [31, 32, 33, 34])
    lease = cache.acquire([*SYSTEM[:6], 77])
    before = lease.page_table.tolist()
    cache.evict(8)
    cache.check()
    assert length(cache, SYSTEM) >= 6 and length(cache, [31]) == 0
    assert lease.page_table.tolist() == before
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 4 * 9)
    assert lease.page_table.tolist() == before


def test_a_lease_in_the_middle_of_an_edge_does_not_hold_the_rest() -> None:
    cache = a_cache(page_size=1, num_pages=10)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lease = cache.acquire([1, 2, 3, 9])
    assert cache.evict(10) == 5
    assert length(cache, [1, 2, 3, 4]) == 3
    cache.release(lease)


def test_out_of_pages_leaves_all_as_it_was() -> None:
    cache = a_cache(num_pages=6)
    put(cache, SYSTEM)
    put(cache, [31, 32, 33, 34])
    lease = cache.acquire([*SYSTEM, 11])
    heard: list[object] = []
    cache.events.append(heard.append)
    before = (cache.pool.num_free, np.asarray(cache.pool.refs).tolist(), lease.page_table.tolist())
    stats = vars(cache.stats).copy()
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 4 * 6 + 1)
    after = (cache.pool.num_free, np.asarray(cache.pool.refs).tolist(), lease.page_table.tolist())
    assert after == before and not heard and vars(cache.stats) == stats
    assert length(cache, [31, 32, 33, 34]) == 4
    cache.check()
    cache.reserve(lease, 4 * 6)
    assert length(cache, [31, 32, 33, 34]) == 0, "all six pages can be had"


def test_the_pages_of_a_request_larger_than_the_pool_are_refused() -> None:
    cache = a_cache(num_pages=2)
    lease = cache.acquire(list(range(100)))
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 100)
    cache.reserve(lease, 8)
    assert cache.pool.num_free == 0


def a_shadowed_page(num_pages: int) -> tuple[RadixCache, Lease]:
    """A lease inside an edge whose last page only a copy further down stands for."""
    cache, stem = a_cache(num_pages=num_pages), [1, 2, 3, 4, 5, 6]
    put(cache, [*stem, 11])
    put(cache, [*stem, 21])  # copies the second page
    lease = cache.acquire([1, 2, 3, 9])
    cache.acquire([*stem, 21, 99])
    cache.evict(1)  # the first branch goes; one branch is left
    return cache, lease


def test_a_refusal_frees_no_page_on_its_way() -> None:
    cache, lease = a_shadowed_page(num_pages=4)
    free = cache.pool.num_free
    try:  # the shadowed page may count as evictable or not
        cache.reserve(lease, 8)
    except OutOfPages:
        assert cache.pool.num_free == free
    cache.check()


def test_nothing_is_evicted_for_pages_that_come_free_anyway() -> None:
    cache, lease = a_shadowed_page(num_pages=6)
    put(cache, [51, 52, 53, 54])
    free = cache.pool.num_free
    cache.reserve(lease, 4 * (free + 1))  # and one page for the copy
    cache.check()
    kept = length(cache, [51, 52, 53, 54]) > 0
    assert cache.pool.num_free == 0 or kept, "a page is free, yet 51 was evicted"


# ------------------------------------------------------------------------------ statistics


def test_stats_count_once_at_admission() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    lease = cache.acquire([*SYSTEM, 11, 12])
    assert cache.stats.requests == 1, "waiting is not admission"
    append(cache, lease, [11])
    append(cache, lease, [12])
    append(cache, lease, [13])
    cache.release(lease)
    stats = cache.stats
    assert (stats.requests, stats.query_tokens, stats.hit_tokens) == (2, 22, 10)
    assert stats.hit_rate == 10 / 22


def test_resumed_requests_do_not_flatter_the_hit_rate() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    lease = cache.acquire([*SYSTEM, 11], resumed=True)
    append(cache, lease, [11])
    stats = cache.stats
    assert (stats.requests, stats.query_tokens, stats.hit_tokens) == (1, 10, 0)
    assert (stats.resumed_query_tokens, stats.resumed_hit_tokens) == (11, 10)


def test_the_hit_rate_of_nothing_is_zero() -> None:
    assert a_cache().stats.hit_rate == 0.0


# ------------------------------------------------------------------------------ pins


def test_pins_survive_pressure_until_unpinned() -> None:
    cache = a_cache(num_pages=8)
    cache.pin_budget = 6
    put(cache, SYSTEM)
    cache.pin("system", SYSTEM)
    assert cache.pins == {(None, "system"): 10}
    assert cache.evict(8) == 0
    lease = cache.acquire([31] * 20)
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 4 * 5 + 1)
    cache.unpin("system")
    assert cache.pins == {}
    cache.reserve(lease, 4 * 5 + 1)
    assert length(cache, SYSTEM) == 8


def test_pins_count_against_the_budget() -> None:
    cache = a_cache(num_pages=8)
    cache.pin_budget = 5
    put(cache, SYSTEM)
    put(cache, [31, 32, 33])
    cache.pin("system", SYSTEM)
    with pytest.raises(PinError, match="makes 4 pinned pages, the share is 3"):
        cache.pin("other", [31, 32, 33])
    assert cache.pins == {(None, "system"): 10}
    assert cache.evict(8) == 1, "the refused pin holds nothing"
    cache.unpin("system")
    put(cache, [31, 32, 33])
    cache.pin("other", [31, 32, 33])


def test_half_of_the_pool_is_the_default_budget_and_a_namespace_gets_half_of_that() -> None:
    cache = a_cache(num_pages=8)
    for namespace in ("a", "b"):
        put(cache, SYSTEM, namespace)
        with pytest.raises(PinError, match="makes 3 pinned pages, the share is 2"):
            cache.pin("system", SYSTEM, namespace)
        cache.pin("two pages", SYSTEM[:8], namespace)
        assert cache.pinned_pages_of(namespace) == 2
    put(cache, [31])
    with pytest.raises(PinError, match="more pages than all pins together have left"):
        cache.pin("one page", [31])
    assert cache.pinned_pages == cache.pin_budget == 4
    cache.check()


def test_each_namespace_has_names_of_its_own() -> None:
    cache = a_cache(num_pages=16)
    for namespace in (None, "a"):
        put(cache, SYSTEM, namespace)
        cache.pin("system", SYSTEM, namespace)
        cache.check()
    with pytest.raises(PinError, match="no prefix named 'system' is pinned"):
        cache.unpin("system", "b")
    cache.unpin("system", "a")
    cache.check()
    assert cache.pins == {(None, "system"): 10}
    cache.evict(16)
    assert length(cache, SYSTEM) == 10 and cache.match([*SYSTEM, 11], "a") == 0


def test_a_pin_in_the_middle_of_an_edge_holds_its_own_part_only() -> None:
    cache = a_cache(page_size=1, num_pages=16)
    put(cache, SYSTEM)
    cache.pin("stem", SYSTEM[:4])
    assert cache.evict(16) == 6
    assert length(cache, SYSTEM) == 4


@pytest.mark.parametrize(
    "misuse",
    [
        lambda cache: cache.unpin("nobody"),
        lambda cache: cache.pin("system", SYSTEM),
        lambda cache: cache.pin("longer", [*SYSTEM, 11]),
        lambda cache: cache.pin("elsewhere", SYSTEM, "namespace"),
    ],
    ids=["unknown", "twice", "not cached in full", "other namespace"],
)
def test_a_pin_that_makes_no_sense_is_refused(misuse: Callable[[RadixCache], None]) -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    cache.pin("system", SYSTEM)
    with pytest.raises(PinError):
        misuse(cache)
    assert cache.pins == {(None, "system"): 10}
    cache.unpin("system")
    assert cache.evict(16) == 3


def test_tokens_in_flight_cannot_be_pinned() -> None:
    cache = a_cache()
    begin(cache, SYSTEM)
    with pytest.raises(PinError, match="in flight"):
        cache.pin("system", SYSTEM)
    cache.check()
    cache.commit()
    cache.pin("system", SYSTEM)
    cache.check()


# ------------------------------------------------------------------------------ what follows


def test_what_follows_a_prefix_is_read_along_the_branch_added_last() -> None:
    cache = a_cache()

    def follow(tokens: Sequence[int], count: int = 9) -> tuple[int, list[int]]:
        length, following = cache.follow(tokens, None, count)
        return length, following[0].tolist() if following else []

    assert follow([1, 2]) == (0, [])
    for tokens in ([1, 2, 3, 4], [1, 2, 6, 6, 6], [1, 2, 5]):
        put(cache, tokens)
    assert follow([1, 2]) == (2, [5])
    assert follow([1]) == (1, [2, 5])
    assert follow([]) == (0, [1, 2, 5])
    assert follow([1, 2, 6, 6, 7]) == (4, [6])
    assert follow([1, 2, 6, 6, 6]) == (5, [])
    put(cache, [1, 2, 3, 4])  # used again, and split: neither makes a branch younger
    put(cache, [1, 2, 3, 8])
    assert follow([1, 2]) == (2, [5])
    assert follow([1, 2, 3]) == (3, [8])
    assert follow([1, 2, 6], count=1) == (3, [6])
    assert follow([1, 2], count=0) == (2, [])
    many = [[branch.tolist() for branch in cache.follow([1, 2], None, 3, n)[1]] for n in (2, 9)]
    assert many == [[[5], [6, 6, 6]], [[5], [6, 6, 6], [3, 8]]]
    put(cache, [1, 2, 5, 7, 7])
    assert follow([1], count=3) == (1, [2, 5, 7])
    assert cache.follow([1, 2], "tenant")[0] == 0
    cache.check()


def test_the_cached_length_counts_what_a_hit_must_leave_out() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    assert (cache.match(SYSTEM), cache.cached_length(SYSTEM)) == (9, 10)
    lease = begin(cache, [*SYSTEM, 11, 12, 13, 14, 15])
    prompt = [*SYSTEM, 11, 12, 13, 14, 99]
    assert (cache.match(prompt), cache.cached_length(prompt)) == (12, 14)  # in flight
    cache.commit()
    assert (cache.match(prompt), cache.cached_length(prompt)) == (14, 14)
    cache.release(lease)
    none = NoCache(PagePool(4, 4))
    assert none.cached_length(SYSTEM) == 0
    assert (cache.granularity, none.granularity) == (1, 0)


# ------------------------------------------------------------------------------ events and reset


def test_events_replay_to_the_same_content() -> None:
    cache, replay = a_cache(num_pages=6), Replay()
    cache.events.append(replay)
    paths = [[*SYSTEM, 11, 12], [*SYSTEM[:5], 21], [31, 32, 33, 34, 35, 36], [*SYSTEM, 41]]
    for path in paths:
        put(cache, path)
        for seen in paths:
            found = length(cache, seen)
            assert sum(name in replay.names for name in chain_of(None, seen)) == found
    begin(cache, [51, 52])
    cache.rollback()
    assert not replay.names & set(chain_of(None, [51, 52]))


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


def test_a_namespace_that_cannot_be_hashed_is_refused_and_changes_nothing() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    namespace = cast(Hashable, ["salt"])
    calls: list[Callable[[], object]] = [
        lambda: cache.acquire(SYSTEM, namespace),
        lambda: cache.pin("name", SYSTEM, namespace),
        lambda: cache.match(SYSTEM, namespace),
        lambda: cache.cached_length(SYSTEM, namespace),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match=r"a namespace must be hashable, not \['salt'\]"):
            call()
        assert not cache.broken
        cache.check()
    assert length(cache, SYSTEM) == len(SYSTEM)


def test_events_name_the_positions() -> None:
    cache = a_cache()
    heard: list[Stored | Evicted | Cleared] = []
    cache.events.append(heard.append)
    put(cache, SYSTEM)
    put(cache, [*SYSTEM, 11])
    cache.evict(1)
    cache.reset()
    told = [
        (type(e).__name__, e.start, e.tokens.tolist())
        if not isinstance(e, Cleared)
        else ("Cleared",)
        for e in heard
    ]
    assert told == [
        ("Stored", 0, SYSTEM),
        ("Stored", 10, [*SYSTEM, 11]),
        ("Evicted", 8, [*SYSTEM, 11]),
        ("Cleared",),
    ]


def test_reset_forgets_everything() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    put(cache, SYSTEM, "a")
    cache.reset()
    cache.check()
    assert length(cache, SYSTEM) == length(cache, SYSTEM, "a") == 0
    assert cache.pool.num_free == 16 and vars(cache.stats) == vars(type(cache.stats)())
    assert put(cache, SYSTEM) == 0


def test_reset_is_refused_while_leased_or_pinned() -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    lease = cache.acquire([*SYSTEM, 11])
    with pytest.raises(LeaseError):
        cache.reset()
    cache.release(lease)
    cache.pin("system", SYSTEM)
    with pytest.raises(LeaseError):
        cache.reset()
    assert length(cache, SYSTEM) == 10
    cache.unpin("system")
    cache.reset()


# ------------------------------------------------------------------------------ bad calls


def test_a_released_lease_is_dead() -> None:
    cache = a_cache()
    lease = cache.acquire(SYSTEM)
    cache.release(lease)
    calls: list[Callable[[], object]] = [
        lambda: cache.release(lease),
        lambda: cache.reserve(lease, 4),
        lambda: cache.publish(lease, [1]),
    ]
    for call in calls:
        with pytest.raises(LeaseError):
            call()
    cache.check()
    assert cache.pool.num_free == 16


def test_publish_without_reserve_is_refused() -> None:
    cache = a_cache()
    lease = cache.acquire(SYSTEM)
    with pytest.raises(LeaseError):
        cache.publish(lease, [1])
    cache.reserve(lease, 4)
    with pytest.raises(LeaseError):
        cache.publish(lease, SYSTEM)
    assert lease.num_tokens == 0 and length(cache, SYSTEM) == 0 and cache.stats.requests == 0


def test_publish_into_a_shared_half_page_without_reserve_is_refused() -> None:
    cache = a_cache()
    put(cache, [*SYSTEM, 11])
    lease = cache.acquire([*SYSTEM, 21])
    with pytest.raises(LeaseError):
        cache.publish(lease, [21])
    cache.check()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda cache, lease: cache.acquire([]),
        lambda cache, lease: cache.acquire([[1, 2], [3, 4]]),
        lambda cache, lease: cache.publish(lease, []),
        lambda cache, lease: cache.reserve(lease, -1),
        lambda cache, lease: cache.reserve(lease, 10**9),
        lambda cache, lease: cache.evict(-1),
        lambda cache, lease: cache.pin("empty", []),
    ],
    ids=["no prompt", "2-d", "publish nothing", "negative", "too many", "evict negative", "no pin"],
)
def test_a_call_that_makes_no_sense_changes_nothing(
    misuse: Callable[[RadixCache, Lease], object],
) -> None:
    cache = a_cache()
    put(cache, SYSTEM)
    lease = cache.acquire([*SYSTEM, 11])
    before = (cache.pool.num_free, np.asarray(cache.pool.refs).tolist(), lease.num_tokens)
    try:
        made = misuse(cache, lease)
    except (RadixCacheError, ValueError):
        pass
    else:  # an empty call may be a harmless one
        if isinstance(made, Lease):
            cache.release(made)
    cache.check()
    assert (cache.pool.num_free, np.asarray(cache.pool.refs).tolist(), lease.num_tokens) == before
    assert length(cache, SYSTEM) == 10


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (-1, 4), (4, 0), (4, -1)])
def test_a_pool_of_nothing_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        PagePool(num_pages, page_size)


def test_a_lease_of_another_cache_is_refused() -> None:
    cache, other = a_cache(), a_cache()
    lease = other.acquire(SYSTEM)
    with pytest.raises(LeaseError):
        cache.reserve(lease, 10)
    with pytest.raises(LeaseError):
        cache.release(lease)


# ------------------------------------------------------------------------------ the baseline


def test_no_cache_never_shares_and_never_leaks() -> None:
    cache = NoCache(PagePool(16, 4))
    heard: list[object] = []
    cache.events.append(heard.append)
    one, two = begin(cache, SYSTEM), begin(cache, SYSTEM)
    assert one.cached_tokens == two.cached_tokens == 0
    assert not set(one.page_table.tolist()) & set(two.page_table.tolist())
    cache.commit()
    assert append(cache, one, [11, 12, 13]) == []
    assert cache.pool.num_free == 16 - 4 - 3
    cache.check()
    cache.release(one)
    cache.release(two)
    assert cache.match(SYSTEM) == 0 and cache.pool.num_free == 16 and not heard
    stats = cache.stats
    assert (stats.requests, stats.query_tokens, stats.hit_tokens) == (2, 20, 0)


def test_what_was_split_and_merged_again_in_a_step_is_still_in_flight() -> None:
    cache = a_cache(page_size=1, num_pages=10)
    put(cache, [20, 21])
    lease = begin(cache, [1, 2, 3, 4, 5, 6])
    other = cache.acquire([1, 2, 3, 9, 9, 9])
    cache.reserve(other, 6)  # evicts, and so cuts the node where it stands
    cache.release(other)
    cache.check()
    cache.rollback()
    cache.check()
    assert lease.num_tokens == 0 == cache.cached_length([1, 2, 3, 4, 5, 6])


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
            put(cache, prompt)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.stats.evicted_pages == 0
    assert taken / len(prompts) / length < 22 + 4 + 4 / page_size


def test_no_cache_keeps_the_same_contract() -> None:
    cache = NoCache(PagePool(4, 4))
    lease = begin(cache, SYSTEM)
    with pytest.raises(LeaseError):
        cache.release(lease)
    cache.rollback()
    assert lease.num_tokens == 0 and len(lease.page_table) == 0 and cache.pool.num_free == 4
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 17)
    with pytest.raises(LeaseError):
        cache.publish(lease, [1])
    append(cache, lease, SYSTEM)
    cache.rollback()
    assert lease.num_tokens == 10
    with pytest.raises(LeaseError):
        cache.reset()
    with pytest.raises(PinError):
        cache.pin("system", SYSTEM)
    with pytest.raises(PinError):
        cache.unpin("system")
    assert cache.pins == {}
    cache.release(lease)
    with pytest.raises(LeaseError):
        cache.release(lease)
    cache.reset()
    assert cache.stats.requests == 0
