"""Which leaf goes first, by each policy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from radixcache import InvalidRequest, OutOfPages, PagePool, RadixCache
from radixcache.eviction import POLICIES, EvictionPolicy

SEED = 20_261_122


def a_cache(policy: str | EvictionPolicy, num_pages: int = 100) -> RadixCache:
    return RadixCache(PagePool(num_pages, 1), policy=policy)


def use(cache: RadixCache, word: int, priority: int = 0) -> None:
    """One request of three tokens that begin with `word`."""
    tokens = [word, word, word]
    lease = cache.acquire([*tokens, 0])
    lease.priority = priority
    if lease.num_tokens < 3:
        cache.reserve(lease, 3)
        cache.publish(lease, tokens[lease.num_tokens :])
    else:  # all cached: one token more makes it a use
        cache.reserve(lease, 4)
        cache.publish(lease, [0])
    cache.commit()
    cache.release(lease)


def order_of_eviction(cache: RadixCache, words: list[int]) -> list[int]:
    """Words in the order in which their first token goes."""
    gone: list[int] = []
    while cache.evict(1):
        cache.check()
        gone += [w for w in words if w not in gone and not cache.match([w, w])]
    assert cache.pool.num_free == cache.pool.num_pages
    return gone


def test_lru_takes_what_was_used_longest_ago() -> None:
    cache = a_cache("lru")
    for word in (1, 2, 3, 1):
        use(cache, word)
    assert order_of_eviction(cache, [1, 2, 3]) == [2, 3, 1]


def test_lfu_takes_what_was_used_least_then_longest_ago() -> None:
    cache = a_cache("lfu")
    for word in (1, 1, 1, 2, 3, 3, 4):
        use(cache, word)
    assert order_of_eviction(cache, [1, 2, 3, 4]) == [2, 4, 3, 1]


def test_fifo_takes_what_came_first_however_often_it_is_used() -> None:
    cache = a_cache("fifo")
    for word in (1, 2, 3, 1, 1, 2):
        turn(cache, [word, word, word])  # stores nothing the second time
    assert order_of_eviction(cache, [1, 2, 3]) == [1, 2, 3]


def test_priority_takes_the_lowest_first_then_the_least_recent() -> None:
    cache = a_cache("priority")
    for word, priority in ((1, 5), (2, 0), (3, 1), (4, 0), (3, 0)):
        use(cache, word, priority)
    assert order_of_eviction(cache, [1, 2, 3, 4]) == [2, 4, 3, 1]


def turn(cache: RadixCache, tokens: list[int], priority: int = 0) -> None:
    """One request that computes all of `tokens` that it does not find."""
    lease = cache.acquire(tokens)
    lease.priority = priority
    cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens[lease.num_tokens :])
    cache.commit()
    cache.release(lease)
    cache.check()


STEM, TAIL, OTHER = [1, 1, 1], [2, 2, 2], [3, 3, 3]


def order_of_parts(cache: RadixCache) -> str:
    """In which order the last tokens of tail, other and stem go."""
    gone = ""
    parts = {"tail": STEM + TAIL[:1], "other": OTHER[:1], "stem": STEM[:1]}
    while cache.evict(1):
        cache.check()
        gone += "".join(
            f"{name} "
            for name, tokens in parts.items()
            if name not in gone and cache.match([*tokens, 0]) < len(tokens)
        )
    return gone.strip()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_tail_has_its_own_priority_not_that_of_its_stem(page_size: int) -> None:
    cache = RadixCache(PagePool(100, page_size), policy="priority")
    turn(cache, STEM, priority=9)
    turn(cache, STEM + TAIL, priority=0)
    turn(cache, OTHER, priority=5)
    assert order_of_parts(cache) == "tail other stem"


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_last_turn_of_a_conversation_was_used_once(page_size: int) -> None:
    cache = RadixCache(PagePool(100, page_size), policy="lfu")
    turn(cache, [1])
    turn(cache, STEM[:2])
    turn(cache, OTHER)
    turn(cache, [*OTHER, 0])
    turn(cache, STEM + TAIL)
    assert order_of_parts(cache) == "tail other stem"


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_tail_is_as_old_as_the_request_that_stored_it(page_size: int) -> None:
    cache = RadixCache(PagePool(100, page_size), policy="fifo")
    turn(cache, STEM)
    turn(cache, OTHER)
    turn(cache, STEM + TAIL)
    assert order_of_parts(cache) == "other tail stem"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_in_many_chunks_is_one_node(policy: str) -> None:
    """Its tokens have all been used alike, and at one time."""
    cache = RadixCache(PagePool(100, 4), policy=policy)
    lease = cache.acquire(range(90))
    for end in range(3, 90, 3):
        cache.reserve(lease, end)
        cache.publish(lease, range(end - 3, end))
        cache.commit()
        cache.check()
    cache.release(lease)
    (root,) = cache.snapshot().values()
    assert [node.num_tokens for node in root.children] == [87]


def test_where_priorities_do_not_differ_a_conversation_is_one_node() -> None:
    cache = a_cache("priority")
    for length in range(2, 20, 2):
        turn(cache, list(range(length)), priority=length // 4)
    (root,) = cache.snapshot().values()
    assert [node.num_tokens for node in root.children] == [18], "a tail of more covers its stem"


def test_a_negative_priority_goes_before_none() -> None:
    cache = a_cache("priority")
    for word, priority in ((1, 0), (2, -1), (3, 0)):
        use(cache, word, priority)
    assert order_of_eviction(cache, [1, 2, 3]) == [2, 1, 3]


def test_splits_and_merges_count_no_use_twice() -> None:
    """Branches split an edge twice, and go again: its stem was used three times, the other four."""
    cache = a_cache("lfu")
    turn(cache, [1, 1, 1, 1, 1, 1])
    turn(cache, [1, 1, 1, 8])
    turn(cache, [1, 1, 9])
    for _ in range(4):
        turn(cache, [5, 5])
    assert order_of_eviction(cache, [1, 5]) == [1, 5]


def test_a_policy_may_be_any_function_of_the_leaf() -> None:
    cache = a_cache(lambda leaf: (leaf.uses > 1, leaf.last_use))  # a scan does not flush it
    use(cache, 1)
    use(cache, 1)
    for word in range(10, 40):
        use(cache, word)
    cache.evict(80)
    assert cache.match([1, 1, 1, 9]) == 3


@pytest.mark.parametrize("key", [lambda word: 1 / (word - 3), lambda word: "3" if word == 3 else 1])
def test_a_policy_that_fails_leaves_a_cache_that_can_recover(key: Callable[[int], object]) -> None:
    """It raises, or gives keys that cannot be compared: that comes out, and nothing is lost."""
    cache = a_cache(lambda leaf: key(leaf.first_token))
    use(cache, 1)
    with pytest.raises((ZeroDivisionError, TypeError)):
        use(cache, 3)
    assert cache.broken
    cache.recover()
    cache.check()
    use(cache, 1)
    cache.check()
    assert cache.match([1, 1, 1, 9]) == 3


def test_an_unknown_policy_is_one_sentence() -> None:
    with pytest.raises(InvalidRequest, match="policy must be one of lru, lfu, fifo, priority"):
        a_cache("random")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_every_invariant(policy: str) -> None:
    """Random prompts over a small alphabet: splits and merges while keys stand in the order."""
    rng = random.Random(f"{SEED}/{policy}")
    cache = RadixCache(PagePool(20, 2), policy=policy)
    for _ in range(1500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(2, 20))]
        lease = cache.acquire(tokens)
        lease.priority = rng.randrange(3)
        cache.reserve(lease, len(tokens))
        cache.publish(lease, tokens[lease.num_tokens :], written=rng.random() < 0.5)
        cache.check()
        cache.commit()
        cache.release(lease)
        cache.check()
    assert cache.stats.evicted_pages > 100, f"seed {SEED}"


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_can_be_evicted_is_counted_once_however_many_tokens_find_no_page(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RadixCache(PagePool(100, page_size))
    counted = 0

    def count(count_held: Callable[[], int] = cache._count_held) -> int:
        nonlocal counted
        counted += 1
        return count_held()

    leases = []
    for word in range(10):
        lease = cache.acquire([word] * 9)
        cache.reserve(lease, 9 * page_size)
        cache.publish(lease, [word] * 9)
        leases.append(lease)
    cache.commit()
    cache.release(leases.pop(0))
    monkeypatch.setattr(cache, "_count_held", count)
    room = leases[0].capacity
    evictable = cache.pool.num_free + (9 if page_size == 1 else 3)
    for taken in range(30):
        can = taken < evictable
        with contextlib.nullcontext() if can else pytest.raises(OutOfPages):
            cache.reserve(leases[taken % 9], leases[taken % 9].capacity + page_size)
        assert sum(lease.capacity for lease in leases) - 9 * room == page_size * min(
            taken + 1, evictable
        )
    assert counted == 1
    monkeypatch.undo()
    cache.check()


def test_tokens_published_as_written_are_not_in_flight() -> None:
    cache = RadixCache(PagePool(8, 4))
    lease = cache.acquire([1, 2, 3])
    cache.reserve(lease, 6)
    cache.publish(lease, [1, 2, 3])
    cache.commit()
    cache.publish(lease, [4, 5, 6], written=True)
    cache.rollback()
    assert lease.num_tokens == 6 and cache.match([1, 2, 3, 4, 5, 6, 7]) == 6
    cache.release(lease)  # nothing to commit first


def test_written_tokens_do_not_hang_on_the_same_ones_in_flight() -> None:
    """They would fall with them, though their KV is there."""
    cache = RadixCache(PagePool(8, 1))
    first, second = cache.acquire([1, 2]), cache.acquire([1, 3])
    for lease in (first, second):
        cache.reserve(lease, 4)
    cache.publish(first, [1])
    cache.publish(second, [1])
    cache.commit()
    cache.publish(first, [2, 9])  # in flight
    cache.publish(second, [2, 9, 9], written=True)
    assert second.num_tokens == 1, "not published, as the contract says"
    cache.check()
    cache.rollback()
    cache.publish(second, [2, 9, 9], written=True)
    assert second.num_tokens == 4
    cache.check()
