"""vLLM's facts of the hash-block cache, one example for each, page numbers included."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest

from radixcache import HashBlockCache, InvalidRequest, LeaseError, OutOfPages, PagePool, PinError
from radixcache.block_hash import BlockNamespace, Image, first_parent, hash_block
from radixcache.blocks import PromptHashes
from radixcache.hash_block import BlockLease
from tests.index.drive import append, begin, put
from tests.index.model import as_event

B = 16


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def a_cache(num_pages: int = 11, page_size: int = B) -> HashBlockCache:
    return HashBlockCache(PagePool(num_pages, page_size))


def some(count: int, first: int = 0) -> list[int]:
    """`count` tokens that no other call with another `first` has."""
    return list(range(1000 * first, 1000 * first + count))


def run(cache: HashBlockCache, tokens: Sequence[int], **options: Any) -> BlockLease:
    """A lease on all of `tokens`, computed."""
    lease: BlockLease = begin(cache, tokens, **options)
    cache.commit()
    cache.check()
    return lease


def ids(lease: BlockLease) -> list[int]:
    pages: list[int] = lease.page_table.tolist()
    return pages


# -- hashing ---------------------------------------------------------------------------------------

GOLDEN = "066b1e8987e02713 fe8fa5dda3210d0c 8be7aaa33831156d 9d537f74907f6ada".split()


def chain(namespace: BlockNamespace, count: int) -> list[str]:
    """First bytes of the parent of tokens 0..47 and of their first `count` blocks."""
    parent = first_parent()
    found = [parent.hex()[:16]]
    for start in range(0, count * B, B):
        keys = namespace.keys(start, start + B)
        parent = hash_block((parent, tuple(range(start, start + B)), keys))
        found.append(parent.hex()[:16])
    return found


def test_hashes_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chain(BlockNamespace(), len(GOLDEN) - 1) == GOLDEN
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert chain(BlockNamespace(), 1) != GOLDEN[:2]


def test_extra_keys_are_tagged_and_ordered() -> None:
    namespace = BlockNamespace(
        salt="s",
        lora=("name", "/path"),
        images=(Image("cat", 10, 30), Image("dog", 40, 4), Image("cow", 47, 1)),
        prompt_embeds=(b"d0", b"d1"),
    )
    lora = ("lora", "name", "/path")
    assert namespace.keys(0, 16) == (
        lora,
        ("mm", "cat", 10),
        ("cache_salt", "s"),
        ("prompt_embeds", b"d0"),
    )
    assert namespace.keys(16, 32) == (lora, ("mm", "cat", -6), ("prompt_embeds", b"d1"))
    third = namespace.keys(32, 48)
    assert third is not None
    assert third[1:-1] == (("mm", "cat", -22), ("mm", "dog", 8), ("mm", "cow", 15))
    fourth = BlockNamespace(salt="s", images=namespace.images).keys(48, 64)
    assert fourth is None and BlockNamespace(salt="").keys(0, 16) is None


def test_same_tokens_with_another_image_adapter_or_salt_are_not_found() -> None:
    cache = a_cache(num_pages=60)
    namespaces: list[Hashable] = [
        None,
        "s",
        BlockNamespace(lora=("a", "/p")),
        BlockNamespace(lora=("a", "/q")),
        BlockNamespace(images=(Image("cat", 20, 5),)),
        BlockNamespace(images=(Image("cat", 21, 5),)),
        BlockNamespace(images=(Image("dog", 20, 5),)),
    ]
    hits = [put(cache, some(49), namespace) for namespace in namespaces]
    # An image enters the blocks from the first that it overlaps; before it all is shared.
    assert hits == [0, 0, 0, 0, 16, 16, 16]
    assert [put(cache, some(49), namespace) for namespace in namespaces] == [48] * 7
    assert put(cache, some(49), BlockNamespace(salt="s")) == 48  # the same as "s"
    assert put(cache, some(49), "") == 48  # no salt at all


def test_a_namespace_that_has_no_keys_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache salt"):
        a_cache().match(some(20), namespace=("tenant", 1))


# -- pages and the queue ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit"),
    [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)],
)
def test_a_resent_prompt_hits_whole_blocks_of_all_but_its_last_token(length: int, hit: int) -> None:
    cache = a_cache()
    assert put(cache, some(length)) == 0
    assert cache.match(some(length)) == hit == put(cache, some(length))


@pytest.mark.parametrize(("stem", "hit"), [(15, 0), (16, 16), (31, 16), (32, 32), (47, 32)])
def test_a_shared_stem_hits_its_whole_blocks(stem: int, hit: int) -> None:
    cache = a_cache()
    put(cache, some(60))
    assert cache.match(some(stem) + some(40, 1)) == hit


def test_of_equal_blocks_the_first_published_is_found_while_it_is_there() -> None:
    cache = a_cache()
    one, two, three = (begin(cache, some(32)) for _ in range(3))
    cache.commit()
    assert (ids(one), ids(two), ids(three)) == ([1, 2], [1, 3], [1, 4]), "twins keep their own"
    assert ids(cache.acquire([*some(32), 7])) == [1, 2]


def test_prefill_gives_vllms_pages_counts_and_queue() -> None:
    cache = a_cache()
    r0 = run(cache, some(55))
    r1 = run(cache, some(48) + some(5, 1))
    assert (ids(r0), ids(r1)) == ([1, 2, 3, 4], [1, 2, 3, 5]) and r1.cached_tokens == 48
    assert cache.pool.refs[[1, 2, 3]].tolist() == [2, 2, 2] and cache.pool.num_free == 5
    cache.release(r0)
    cache.release(r1)
    assert cache.queue == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    r2 = run(cache, some(48) + some(5, 2))
    assert ids(r2) == [1, 2, 3, 5] and cache.pool.num_free == 6
    cache.release(r2)
    assert ids(run(cache, some(160, 3))) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_freed_blocks_queue_by_time_of_freeing_the_tail_first() -> None:
    cache = a_cache()
    r0, r1 = run(cache, some(87)), run(cache, some(48, 1))
    assert (ids(r0), ids(r1)) == ([1, 2, 3, 4, 5, 6], [7, 8, 9]) and cache.pool.num_free == 1
    cache.release(r0)
    assert cache.queue == [6, 10, 5, 4, 3, 2, 1]
    cache.release(r1)
    assert cache.queue == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    r2 = run(cache, some(35))
    assert r2.cached_tokens == 32 and ids(r2) == [1, 2, 6] and cache.pool.num_free == 7


def test_several_pages_without_a_block_go_to_the_head_the_last_one_first() -> None:
    cache = a_cache()
    lease = cache.acquire(some(70))
    cache.reserve(lease, 70)
    cache.release(lease)
    assert cache.queue == [5, 4, 3, 2, 1, 6, 7, 8, 9, 10]


def test_decoded_tokens_fill_blocks_that_are_then_published() -> None:
    cache = a_cache()
    lease = run(cache, some(55))
    append(cache, lease, some(4, 1))
    assert ids(lease) == [1, 2, 3, 4]
    assert cache.cached_length([*some(55), *some(4, 1), 7]) == 48
    append(cache, lease, some(19, 2))
    assert ids(lease) == [1, 2, 3, 4, 5]
    assert cache.cached_length([*some(55), *some(4, 1), *some(19, 2)]) == 64


@pytest.mark.parametrize(("prompt", "generated", "blocks"), [(16, 16, 1), (17, 16, 2), (1, 1, 0)])
def test_the_last_sampled_token_never_gets_kv(prompt: int, generated: int, blocks: int) -> None:
    cache = a_cache()
    lease = run(cache, some(prompt))
    if generated > 1:
        append(cache, lease, some(generated - 1, 1))
    cached = cache.cached_length([*some(prompt), *some(generated, 1)])
    assert cached // B == (prompt + generated - 1) // B == blocks


def test_chunks_are_published_one_by_one() -> None:
    cache = a_cache()
    lease = cache.acquire(some(60))
    found = []
    for end in (10, 30, 33, 60):
        cache.reserve(lease, end)
        cache.publish(lease, some(60)[lease.num_tokens : end])
        cache.commit()
        found.append(cache.match(some(61)))
    assert found == [0, 16, 32, 48]


def test_page_0_is_never_used() -> None:
    cache = a_cache()
    lease = run(cache, some(160))
    assert sorted(ids(lease)) == list(range(1, 11)) and cache.pool.num_free == 0
    with pytest.raises(InvalidRequest, match="never uses page 0"):
        a_cache(num_pages=1)


def test_too_few_free_pages_leave_all_as_it_was() -> None:
    """Hits that nobody uses count as wanted, because they leave the free pages."""
    cache = a_cache()
    run(cache, some(48))
    r1 = run(cache, some(48) + some(48, 1))
    cache.release(r1)
    run(cache, some(32, 2))
    assert cache.queue == [9, 10, 6, 5, 4]
    lease = cache.acquire(some(48) + some(48, 1) + some(48, 3))
    assert ids(lease) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 free"):
        cache.reserve(lease, 144)
    cache.release(lease)
    cache.check()
    assert cache.queue == [9, 10, 6, 5, 4]
    assert cache.pool.refs[1:7].tolist() == [1, 1, 1, 0, 0, 0]
    assert cache.stats.requests == 3


def test_a_page_that_is_used_again_has_no_hash() -> None:
    cache = a_cache(num_pages=3)
    put(cache, some(32))
    assert ids(run(cache, some(15, 1))) == [2]
    assert cache.match(some(33)) == 16


def test_a_block_that_is_hit_is_not_evicted_for_the_same_request() -> None:
    cache = a_cache(num_pages=3)
    put(cache, some(16))
    put(cache, some(16, 1))
    assert cache.queue == [1, 2]
    assert ids(run(cache, some(17))) == [1, 2]


def test_an_orphan_stays_but_cannot_be_found_before_its_predecessor_is_back() -> None:
    cache = a_cache()
    put(cache, some(64))
    cache._evict(1)
    cache.check()
    assert cache.match(some(65)) == 0
    begin(cache, some(16))
    assert cache.match(some(65)) == 64


def test_evict_forgets_in_the_order_of_the_queue_and_moves_nothing() -> None:
    cache = a_cache()
    put(cache, some(40))
    run(cache, some(32, 1))
    queue = cache.queue
    assert queue[-2:] == [2, 1] and cache.evict(1) == 1
    assert cache.queue == queue and cache.match(some(40)) == 16
    assert cache.evict(5) == 1 and cache.evict(5) == 0
    assert cache.match([*some(32, 1), 7]) == 32
    assert (cache.stats.evicted_pages, cache.stats.evicted_tokens) == (2, 32)


def test_reset_is_refused_while_a_page_is_in_use_and_keeps_the_queue() -> None:
    cache = a_cache()
    lease = run(cache, some(55))
    with pytest.raises(LeaseError, match="1 leases live"):
        cache.reset()
    cache.release(lease)
    queue = cache.queue
    cache.reset()
    assert cache.queue == queue and cache.match(some(55)) == 0 == cache.stats.requests


def test_a_preempted_request_finds_its_own_blocks_generated_tokens_included() -> None:
    cache = a_cache()
    lease = run(cache, some(20))
    append(cache, lease, some(15, 1))
    cache.release(lease)  # put back: 36 tokens, 35 of them with KV
    assert run(cache, some(20) + some(16, 1), resumed=True).cached_tokens == 32
    stats = cache.stats
    assert (stats.requests, stats.query_tokens, stats.hit_tokens) == (1, 20, 0)
    assert (stats.resumed_query_tokens, stats.resumed_hit_tokens) == (36, 32)


def test_events_tell_of_each_publication_each_eviction_and_the_reset() -> None:
    cache = a_cache(num_pages=6)
    heard: list[Any] = []
    cache.events.append(heard.append)
    put(cache, some(40))
    put(cache, some(70))
    put(cache, some(80, 1), "salt")
    cache.reset()
    assert list(map(as_event, heard)) == [
        ("stored", None, tuple(some(32)), 0),
        ("stored", None, tuple(some(64)), 32),
        *(("evicted", None, tuple(some(end)), end - B) for end in (64, 48, 32, 16)),
        ("stored", "salt", tuple(some(80, 1)), 0),
        ("cleared", None, (), 0),
    ]


# -- what vLLM does not have -----------------------------------------------------------------------


def test_a_look_holds_what_it_found_where_it_stands_and_release_undoes_it() -> None:
    cache = a_cache()
    put(cache, some(64))
    queue = cache.queue
    lease = cache.acquire(some(64) + some(1, 1))
    assert cache.queue == queue and cache.pool.num_free == 6 and cache.evict(4) == 0
    run(cache, some(96, 1))  # takes every page but those held
    with pytest.raises(OutOfPages):
        begin(cache, some(1, 2))
    cache.release(lease)
    assert cache.queue == [4, 3, 2, 1] and cache.match([*some(64), 7]) == 64


def test_a_page_freed_while_another_lease_only_looks_takes_its_place_in_the_queue_then() -> None:
    cache = a_cache()
    user = run(cache, some(33))
    looking = cache.acquire(some(33))
    cache.release(user)
    assert cache.queue == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
    put(cache, some(20, 1))
    assert cache.queue == [4, 5, 6, 7, 8, 9, 10, 2, 1, 3]
    cache.release(looking)
    assert cache.queue == [4, 5, 6, 7, 8, 9, 10, 2, 1, 3] and cache.pool.num_free == 10


def test_rollback_un_publishes_and_moves_back_everyone_who_hit() -> None:
    cache = a_cache()
    old = run(cache, some(20))
    cache.reserve(old, 50)
    cache.publish(old, some(50)[20:])
    other = begin(cache, some(60))
    assert other.cached_tokens == 48
    cache.rollback()
    cache.check()
    assert (old.num_tokens, old.capacity, ids(old)) == (20, 32, [1, 2])
    assert (other.num_tokens, other.cached_tokens, ids(other)) == (16, 16, [1])
    append(cache, old, some(50)[20:])
    assert cache.match(some(49)) == 48  # the tail was remembered


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("unknown", some(20, 5), "0 of the 1 whole blocks"),
        ("short", some(10), "0 of the 0 whole blocks of the 10 tokens of 'short'"),
        ("system", some(40), "pinned already"),
        ("more", some(16) + some(32, 1), "makes 4 pinned pages, the share is 3"),
        ("early", some(16, 3), "'early' are still in flight"),
    ],
)
def test_pins_keep_whole_blocks_within_the_budget(
    name: str, tokens: list[int], message: str
) -> None:
    cache = a_cache()
    cache.pin_budget = 5
    put(cache, some(40))
    put(cache, some(16) + some(32, 1))
    cache.pin("system", some(40))
    assert cache.pins == {(None, "system"): 32}
    begin(cache, some(16, 3))
    with pytest.raises(PinError, match=message):
        cache.pin(name, tokens)
    cache.check()
    assert cache.evict(99) == 2 and cache.match(some(40)) == 32


def test_misuse_is_refused() -> None:
    cache, other = a_cache(), a_cache()
    lease = run(cache, some(20))
    with pytest.raises(LeaseError, match="belongs to another cache"):
        other.reserve(lease, 40)
    with pytest.raises(LeaseError, match="needs a reserve"):
        cache.publish(lease, some(20))
    with pytest.raises(InvalidRequest, match="a pool of its own"):
        HashBlockCache(cache.pool)


def test_the_hashes_of_prompts_are_kept_within_bounds() -> None:
    hashes = PromptHashes()
    hashes.MAX_TOKENS = 100
    first = hashes.of(np.arange(60, dtype=np.int32), None)
    first.append(b"hash")
    assert hashes.of(np.arange(60, dtype=np.int32), None) is first
    assert hashes.of(np.arange(60, dtype=np.int32), "salt") == []  # 120 tokens: the first goes
    assert hashes.of(np.arange(60, dtype=np.int32), None) == []
    assert hashes.of(np.arange(200, dtype=np.int32), None) == []  # too long, but the only one
