"""Evicted first: what an ended conversation used alone; last: what waiting prompts will find."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixcache import HashBlockCache, NoCache, PagePool, PrefixCache, RadixCache
from radixcache.tokens import Tokens


def text(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 999, length).astype(np.int32)


def use(cache: PrefixCache, tokens: Tokens, ended: bool = False) -> int:
    """Send a prompt through the cache; returns its hit."""
    lease = cache.acquire(tokens)
    hit = lease.num_tokens
    cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens[hit:])
    cache.commit()
    cache.release(lease, ended=ended)
    cache.check()
    return hit


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_a_waiting_prompt_will_find_goes_after_all_else(page_size: int) -> None:
    cache = RadixCache(PagePool(400 // page_size, page_size))
    texts = [text(100, seed) for seed in range(3)]
    for one in texts:
        use(cache, one)
    cut = np.append(texts[0][:40], 1000).astype(np.int32)
    waiting = [(cut, None), (texts[2], "another namespace")]
    cache.coming = lambda: waiting
    use(cache, text(200, 9))  # has room for 100 beside it
    whole = -(-40 // page_size) * page_size
    assert cache.cached_length(texts[0]) in range(40, whole + 1), "not what lies behind the cut"
    assert cache.cached_length(texts[1]) < 100, "it was used after the first, and nobody wants it"


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_wanted_stays_where_nodes_merge(page_size: int) -> None:
    """A stem loses one of two children, and the other absorbs it. A prompt may be a list."""
    cache = RadixCache(PagePool(600 // page_size, page_size))
    stem, new = text(100, 0), text(200, 3)
    for seed in (1, 2):
        use(cache, np.concatenate([stem, text(80, seed)]))
    use(cache, new)
    cache.coming = lambda: [([*stem.tolist(), 1000], None)]
    cache.evict(300 // page_size)
    cache.check()
    assert cache.cached_length(stem) == 100 and cache.cached_length(new) < 200


def test_if_all_is_wanted_the_last_in_the_queue_goes_first() -> None:
    cache = RadixCache(PagePool(100, 4))
    texts = [text(100, seed) for seed in range(4)]
    for one in texts:
        use(cache, one)
    waiting = [(texts[n], None) for n in (2, 0, 3, 1)]
    cache.coming = lambda: waiting
    lease = cache.acquire(text(150, 9))
    cache.reserve(lease, 150)
    assert [cache.cached_length(one) for one in texts] == [100, 0, 100, 48]
    cache.release(lease)
    cache.check()


def test_a_queue_that_is_known_is_served_as_an_oracle_would() -> None:
    """Texts in turns, of which two fit: the order of use never hits. Each time, three of four are
    known beforehand: that is Belady's rule."""
    for page_size in (1, 4):
        texts = [text(96, seed) for seed in range(4)]
        order = [texts[n % 4] for n in range(40)]
        hits = {}
        for known in (0, 3):
            cache = RadixCache(PagePool(2 * 100 // page_size, page_size))
            at = 0
            cache.coming = (
                lambda known=known: [  # type: ignore[misc]
                    (one, None)
                    for one in order[at + 1 : at + 1 + known]  # noqa: B023
                ]
            )
            total = 0
            for at, one in enumerate(order):  # noqa: B007
                total += use(cache, one) // 90
            hits[known] = total
        assert hits[0] == 0
        assert hits[3] >= 11, "with two places for four in turns, every third is a hit"


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_an_ended_conversation_used_alone_goes_first(page_size: int) -> None:
    cache = RadixCache(PagePool(600 // page_size, page_size))
    system, older, ended, newer = text(100, 0), text(80, 1), text(80, 2), text(80, 3)
    for one, is_over in ((older, False), (ended, True), (newer, False)):
        use(cache, np.concatenate([system, one]), is_over)
    cache.evict(80 // page_size)
    kept = [cache.cached_length(np.concatenate([system, one])) for one in (older, ended, newer)]
    assert kept == [180, 100, 180]
    cache.evict(1)
    assert cache.cached_length(system) == 100, "it was used by the last of them"
    assert cache.cached_length(np.concatenate([system, older])) < 180


def test_an_ended_conversation_leaves_no_path_in_pieces() -> None:
    """A stem, whose first half alone was used since, becomes one node with the rest again."""
    cache = RadixCache(PagePool(400, 1))
    stem, ends = text(100, 0), text(20, 2)
    use(cache, np.concatenate([stem, text(20, 1)]))
    use(cache, np.concatenate([stem, ends]))
    use(cache, stem[:40])
    use(cache, np.concatenate([stem, ends]), ended=True)


def test_an_ended_conversation_that_goes_on_counts_as_used() -> None:
    cache = RadixCache(PagePool(300, 1))
    one, other = text(100, 1), text(100, 2)
    use(cache, one, ended=True)
    use(cache, other)
    assert use(cache, np.append(one, [5, 6]).astype(np.int32)) == 100
    cache.evict(100)
    assert cache.cached_length(one) == 100 and cache.cached_length(other) < 100


def test_what_others_use_stays_when_a_conversation_ends() -> None:
    """Others run in it, or have gone on from its middle."""
    cache = RadixCache(PagePool(400, 1))
    one, other = text(100, 1), text(50, 2)
    use(cache, other)
    running = cache.acquire(np.append(one, 7).astype(np.int32))
    use(cache, one)
    use(cache, np.concatenate([one, text(20, 3)]))
    use(cache, one, ended=True)
    cache.evict(50)
    assert cache.cached_length(one) == 100 and cache.cached_length(other) == 0
    cache.release(running)


def test_of_a_conversation_in_which_others_stand_the_rest_goes_first() -> None:
    """As with several completions of one prompt, of which the first to end extended its node."""
    cache = RadixCache(PagePool(400, 1))
    one, other = text(100, 1), text(50, 2)
    use(cache, other)
    leases = [cache.acquire(one, include_last=True)]
    cache.reserve(leases[0], 100)
    cache.publish(leases[0], one)
    cache.commit()
    leases.append(cache.acquire(one, include_last=True))
    cache.reserve(leases[0], 120)
    cache.publish(leases[0], text(20, 3), written=True)
    cache.release(leases[0], ended=True)
    cache.check()
    cache.evict(20)
    assert cache.cached_length(np.concatenate([one, text(20, 3)])) == 100
    assert cache.cached_length(other) == 50
    cache.release(leases[1])
    cache.check()


@pytest.mark.parametrize("kind", [HashBlockCache, NoCache])
def test_other_caches_take_hints_and_keep_their_order(
    kind: type[HashBlockCache] | type[NoCache],
) -> None:
    caches = [kind(PagePool(40, 4)) for _ in range(2)]
    caches[0].coming = lambda: [(text(60, 1), None)]
    rng = random.Random(1)
    for _ in range(60):
        one = text(rng.randint(5, 80), rng.randrange(5))
        assert use(caches[0], one, ended=rng.random() < 0.5) == use(caches[1], one)
        queues = [getattr(cache, "queue", None) for cache in caches]
        assert queues[0] == queues[1]
