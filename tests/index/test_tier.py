"""A second tier: which evicted page goes first, and what is not kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np
import pytest

from radixcache import InvalidRequest, PagePool, RadixCache
from radixcache.pages import Pages
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPage, StoredPages
from tests.index.drive import put


class Slots:
    """A store at once, which remembers the page of each slot."""

    def __init__(self) -> None:
        self.saved: list[list[int]] = []

    def save(self, pages: Pages, stored: StoredPages) -> None:
        self.saved.append(pages.tolist())
        stored.finish("stored")

    def clear(self) -> None:
        self.saved.clear()


def tier_of(slots: int, page_size: int = 2, pages: int = 8) -> tuple[RadixCache, LowerTier, Slots]:
    cache, store = RadixCache(PagePool(pages, page_size)), Slots()
    tier = cache.lower = LowerTier(slots, page_size, store)
    return cache, tier, store


def found(tier: LowerTier, tokens: Sequence[int], start: int = 0) -> int:
    return tier.find(np.array(tokens, np.int32), start)[1]


def load(cache: RadixCache, tier: LowerTier, tokens: Sequence[int]) -> None:
    lease = cache.acquire([*tokens, -1])
    pages, end = tier.find(np.array(tokens, np.int32), lease.num_tokens)
    tier.begin_load(pages)
    before = lease.num_tokens // tier.page_size * tier.page_size
    cache.reserve(lease, end)
    cache.publish(lease, tokens[lease.num_tokens : end], written=True)
    tier.end_load(pages, end - before)
    cache.release(lease)
    cache.check()


def test_evicted_pages_are_found_to_the_token() -> None:
    cache, tier, _ = tier_of(8)
    put(cache, [1, 2, 3, 4, 5])
    cache.evict(8)
    assert cache.match([1, 2, 3, 4, 5, 6]) == 0
    assert found(tier, [1, 2, 3, 4, 5, 6]) == 5
    assert found(tier, [1, 2, 3, 9, 9]) == 3
    assert found(tier, [2, 2, 3, 4]) == 0
    assert found(tier, [1, 2, 3, 4, 5, 6], start=4) == 5
    assert found(tier, [9, 9, 3, 4], start=2) == 2, "the same tokens after others"


def test_what_follows_goes_before_what_it_follows() -> None:
    cache, tier, _ = tier_of(3)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.evict(8)
    assert found(tier, [1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert tier.num_evicted == 1


def test_what_left_together_is_found_page_by_page() -> None:
    cache, tier, store = tier_of(6)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.evict(8)
    put(cache, [9, 9, 9, 9, 9, 9])
    cache.evict(8)
    tier.check()
    assert tier.num_evicted == 1 and tier.num_tokens == 12
    assert found(tier, [5, 6, 7, 8]) == 0, "after other tokens"
    assert found(tier, [1, 2, 3, 0, 0, 0]) == 3
    assert found(tier, [1, 2, 3, 4, 5, 6, 7, 8], start=4) == 6
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.evict(8)  # one page is new, and what was used longest ago makes room for it
    assert store.saved[-1:] == [[3]] and found(tier, [9] * 6) == 4
    tier.check()


def test_a_page_that_was_loaded_goes_first_and_is_not_written_twice() -> None:
    cache, tier, store = tier_of(4)
    for text in ([1, 2, 3, 4], [5, 6, 7, 8]):
        put(cache, text)
        cache.evict(8)
    load(cache, tier, [1, 2, 3, 4])
    before = len(store.saved)
    cache.evict(8)
    assert len(store.saved) == before, "the copy is there"
    load(cache, tier, [5, 6, 7, 8])
    put(cache, [9, 9])
    cache.evict(1)  # the pages of 5 to 8 are in both, one must go
    assert found(tier, [9, 9]) == 2 or found(tier, [5, 6, 7, 8]) == 4
    assert found(tier, [1, 2, 3, 4]) == 4


def test_a_page_that_was_loaded_in_part_is_no_copy() -> None:
    cache, tier, _ = tier_of(4)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.evict(8)
    load(cache, tier, [1, 2, 3])
    tier.demote(np.array([9] * 4, np.int32), 0, np.arange(2, dtype=np.int32))  # two must go
    assert found(tier, [1, 2, 3, 4, 5, 6], start=2) == 6 and found(tier, [1, 2]) == 0
    tier.check()


def test_many_runs_within_each_other_are_looked_at() -> None:
    size = 600
    tier = LowerTier(size * (size + 1) // 2, 1, Slots())
    for first in range(size):
        tier.demote(np.arange(size, dtype=np.int32), first, np.arange(first, size, dtype=np.int32))
    assert found(tier, [*range(size)]) == size
    tier.check()


def test_a_call_that_is_cut_off_loses_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tier, _ = tier_of(8)
    put(cache, [1, 2, 3, 4, 5, 6])
    cache.evict(8)
    pages, _ = tier.find(np.array([1, 2, 3, 4, 5, 6], np.int32), 0)
    tier.begin_load(pages)
    leave, left = tier._leave, list[StoredPage | None]()

    def leave_once(group: Any, page: StoredPage) -> None:
        left.append(page if not left else 1 / 0)  # type: ignore[arg-type]
        leave(group, page)

    with monkeypatch.context() as patched:
        patched.setattr(tier, "_leave", leave_once)
        with pytest.raises(ZeroDivisionError):
            tier.end_load(pages, 6)
    tier.recover([])
    tier.check()
    assert found(tier, [1, 2, 3, 4, 5, 6]) == 6


def test_what_is_read_stays() -> None:
    cache, tier, _ = tier_of(1)
    put(cache, [1, 2])
    cache.evict(8)
    pages, _ = tier.find(np.array([1, 2], np.int32), 0)
    tier.begin_load(pages)
    put(cache, [3, 4])
    cache.evict(8)
    assert found(tier, [3, 4]) == 0 and found(tier, [1, 2]) == 2
    tier.end_load(pages)
    put(cache, [3, 4])
    cache.evict(8)
    assert found(tier, [3, 4]) == 2


def test_beside_what_is_read_other_pages_go() -> None:
    cache, tier, _ = tier_of(3)
    put(cache, [1, 2, 3, 4, 5, 6])
    cache.evict(8)
    pages, _ = tier.find(np.array([1, 2, 3, 4], np.int32), 0)
    tier.begin_load(pages)
    put(cache, [7, 7, 8, 8])
    cache.evict(8)
    tier.check()
    assert found(tier, [7, 7, 8, 8]) == 2 and found(tier, [1, 2, 3, 4, 5, 6]) == 4


@pytest.mark.parametrize("seen", [False, True])
def test_a_page_that_went_down_twice_is_kept_once(seen: bool) -> None:
    cache, tier, store = tier_of(8)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.evict(8)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])  # computed, and nobody has looked into the tier
    cache.evict(1)
    assert store.saved[1:] == [[3]] and len(tier) == 5
    assert not seen or found(tier, [1, 2, 3, 4, 5, 6, 7, 8], start=6) == 8
    assert found(tier, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    tier.check()
    assert len(tier) == 4 and tier.num_tokens == 8


def test_what_makes_room_by_going_further_down_may_hold_the_page_that_comes() -> None:
    cache, below, _ = tier_of(8)
    tier = cache.lower = LowerTier(3, 2, Slots(), "host", below)
    text = [1, 2, 3, 4, 5, 6]
    for length, count in ((6, 8), (4, 1)):  # then in the middle of what nobody has looked at
        put(cache, text[:length])
        cache.evict(count)
        cache.check()
    assert found(tier, text) == 4 and found(below, text, 4) == 6


def test_what_left_together_goes_on_from_a_page_that_is_further_down_as_well() -> None:
    text = np.array([1, 2, 3, 4], np.int32)
    disk = LowerTier(8, 1, Slots())
    host = LowerTier(8, 1, Slots(), "host", below=disk)
    disk.demote(text[:2], 0, np.arange(2, dtype=np.int32))
    host.demote(text, 1, np.arange(3, dtype=np.int32))
    tier, pages, end = host.search(text, 0)
    assert (tier, len(pages), end) == (disk, 2, 2)
    tier, pages, end = host.search(text, end)
    assert (tier, len(pages), end) == (host, 2, 4)
    tier, pages, end = host.search(text, 4)
    assert (pages, end) == ([], 4)
    host.check()


@pytest.mark.parametrize("state", ["writing", "lost"])
def test_what_is_not_there_is_not_found_and_may_come_again(state: str) -> None:
    cache, tier, _ = tier_of(2)
    put(cache, [1, 2])
    cache.evict(8)
    tier.in_order()[0].state = state  # type: ignore[assignment]
    assert found(tier, [1, 2]) == 0
    put(cache, [1, 2])
    cache.evict(8)
    tier.check()
    assert found(tier, [1, 2]) == (2 if state == "lost" else 0)


def test_salted_pages_stay_out_and_a_reset_forgets_all() -> None:
    cache, tier, store = tier_of(8)
    put(cache, [1, 2, 3, 4], "tenant")
    cache.evict(8)
    assert not len(tier)
    put(cache, [1, 2, 3, 4])
    cache.evict(8)
    assert len(tier) == 2 and store.saved
    cache.reset()
    assert not len(tier) and not store.saved


def test_a_tier_without_slots_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one slot"):
        LowerTier(0, 2, Slots())


@pytest.mark.parametrize("seed", range(4))
def test_both_tiers_hold_what_one_lru_cache_of_both_sizes_would(seed: int) -> None:
    """But for the slot of a page that is on its way up, when another goes down."""
    rng, pages, slots = Random(seed), 6, 9
    cache, tier, _ = tier_of(slots, page_size=1, pages=pages)
    recent: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _ in range(400):
        token = min(int(rng.expovariate(0.15)), 40)
        lease = cache.acquire([token], include_last=True)
        stored, _ = tier.find(np.array([token], np.int32), lease.num_tokens)
        hit = bool(lease.num_tokens or stored)
        last = [*reversed(recent)]
        assert hit or token not in last[: pages + slots - 1], "one of the last is lost"
        assert not hit or token in last[: pages + slots], "more than there is room for"
        hits += hit
        tier.begin_load(stored)
        cache.reserve(lease, 1)
        if lease.num_tokens:
            cache.touch(lease)
        else:
            cache.publish(lease, [token], written=True)
        tier.end_load(stored, len(stored))
        cache.release(lease)
        cache.check()
        recent[token] = None
        recent.move_to_end(token)
    assert hits > 200


def test_from_the_root_each_page_comes_once_after_its_parent_with_its_prefix() -> None:
    rng = Random(5)
    cache, tier, _ = tier_of(400, pages=400)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 14))] for _ in range(60)]
    for text in texts:
        put(cache, text)
    cache.evict(400)
    known = {blake2b(digest_size=16).digest()}
    for page, tokens in tier.from_root():
        assert page.key == blake2b(tokens.tobytes(), digest_size=16).digest() not in known
        assert page.parent in known and tokens[-len(page.tokens) :].tolist() == page.tokens.tolist()
        known.add(page.key)
    assert len(known) == len(tier) + 1 and len(tier) > 60
