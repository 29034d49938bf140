"""Any sequence of calls on any cache keeps the contract of `PrefixCache`, and every byte of KV.

Hypothesis plays a scheduler, whose steps may fail. `make test-exhaustive` draws more examples.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase

from radixcache import HashBlockCache, NoCache, OutOfPages, PagePool, RadixCache
from tests.index.contract import Contract, run_examples
from tests.index.drive import put
from tests.index.model import ENDLESS, Kind

CORNERS: dict[Kind, set[str]] = {
    NoCache: {"out of pages", "published as written", "failed steps"},
    HashBlockCache: {
        "evictions", "hits", "hits in flight", "out of pages", "pins", "pins refused",
        "published as written", "resets refused", "failed steps",
    },
}  # fmt: skip
CORNERS[RadixCache] = CORNERS[HashBlockCache] | {"hits of the whole", "tables repointed"}
FEW, SOME, MANY = 10, 100, 300

CASES = [(kind, (), size) for kind in (RadixCache, HashBlockCache) for size in (1, 4, 16)]
NONE = (NoCache, (), 4)  # whose pages are of no one else's
CHAINS = [(5,), (ENDLESS,), (2, 6), (2, ENDLESS)]
TIERS = [(RadixCache, slots, size) for slots in CHAINS for size in (1, 4, 16)]
SOME_TIERS = [TIERS[0], TIERS[4], TIERS[7], TIERS[9]]


@pytest.mark.parametrize(
    ("kind", "slots", "page_size", "examples"),
    [
        *((*case, FEW) for case in (*CASES, NONE, *SOME_TIERS)),
        *(pytest.param(*case, MANY, marks=pytest.mark.exhaustive) for case in CASES),
        *(pytest.param(*case, SOME, marks=pytest.mark.exhaustive) for case in TIERS),
    ],
)
def test_any_sequence_of_calls_keeps_the_contract(
    kind: Kind, slots: tuple[int, ...], page_size: int, examples: int
) -> None:
    """Of few examples always the same, which reach what can happen; of many new ones each time,
    and a failure is shrunk. After its first ten Hypothesis varies those that it has."""
    members = {"kind": staticmethod(kind), "page_size": page_size, "slots": slots}
    counts = run_examples(
        type("Contract", (Contract,), members),
        range(6) if examples == FEW else (None,),
        max_examples=examples,
        phases=[Phase.generate] if examples == FEW else [Phase.generate, Phase.shrink],
    )
    corners = CORNERS[kind] | ({"copies"} if kind is RadixCache and page_size > 1 else set())
    if slots:
        corners = {"evictions", "loads from tier 0"}
        corners |= {"pages in a second tier"} if len(slots) > 1 else set()
    if page_size == 16:  # which they are depends on what is imported
        corners -= {"tables repointed"}
    missed = [corner for corner in corners if not counts[corner]]
    assert examples != FEW or not missed, f"the examples do not reach: {missed}"


def test_what_a_lease_finds_is_held_though_held_pages_were_counted_before() -> None:
    """A call that the few examples may not draw."""
    cache = RadixCache(PagePool(num_pages=4, page_size=1))
    put(cache, [1, 2])
    cache.acquire([1, 9])
    with pytest.raises(OutOfPages):  # which counts
        cache.reserve(cache.acquire([3, 3]), 4)
    cache.acquire([1, 2, 9])
    cache.check()


def test_loaded_tokens_are_the_newest_though_their_lease_computed_nothing() -> None:
    """Another that the few examples may not draw."""
    cache = RadixCache(PagePool(num_pages=3, page_size=1))
    put(cache, [1])
    put(cache, [2])
    lease = cache.acquire([1, 3, 9])
    cache.reserve(lease, 2)
    cache.load(lease, [3])
    cache.release(lease)
    put(cache, [7])
    assert cache.cached_length([1, 3]) == 2 and not cache.cached_length([2])


def test_a_page_that_is_yet_to_be_copied_stays_though_its_lease_moves_on() -> None:
    """Another. A lease computes a cached token anew, in its own copy of a page that all branches
    of the tree have copied, too: beside these it is not needed, but for the copy to come."""
    cache, text = RadixCache(PagePool(num_pages=4, page_size=16)), [*range(16)]
    put(cache, text)
    put(cache, [*text[:15], *range(50, 57)])
    put(cache, [*text[:8], 60])
    cache.acquire([*text[:8], 60, 61])  # which keeps its page
    lease = cache.acquire(text[:14])
    cache.reserve(lease, 14)  # evicts text[15:]
    cache.publish(lease, text[13:14])
    other = cache.acquire([99])
    cache.reserve(other, 1)
    (copy,) = lease.take_copies()
    assert copy.source not in other.page_table and cache.pool.refs[copy.source]
    cache.check()


def test_several_pages_of_a_hash_block_lease_that_only_looks_are_passed_over() -> None:
    """Another that the few examples may not draw."""
    cache = HashBlockCache(PagePool(num_pages=6, page_size=1))
    put(cache, [1, 2])
    put(cache, [3, 4])
    looking = cache.acquire([1, 2, 9])
    lease = cache.acquire([5, 6, 7])
    cache.reserve(lease, 3)
    assert not {*lease.page_table.tolist()} & {*looking.page_table.tolist()}
    cache.check()
