"""What the model of blocks in `test_contract` cannot judge: vLLM's hashes, and its page numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from radixcache import HashBlockCache, InvalidRequest, OutOfPages, PagePool
from radixcache.hash_block.cache import BlockLease
from radixcache.hash_block.hashes import BlockNamespace, Image, first_parent, hash_block
from tests.index.drive import begin, put

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


# -- what vLLM does not have -----------------------------------------------------------------------


def test_a_block_that_a_lease_looks_at_is_not_evicted() -> None:
    cache = a_cache()
    cache.release(run(cache, some(3 * B)))
    looking = cache.acquire(some(2 * B + 1))
    assert looking.num_tokens == 2 * B and cache.evict(10) == 1
    assert cache.cached_length(some(3 * B)) == 2 * B
    cache.release(looking)
    assert cache.evict(10) == 2 and not cache.cached_length(some(3 * B))
    cache.check()


def test_misuse_is_refused() -> None:
    cache = a_cache()
    lease = run(cache, some(20))
    with pytest.raises(InvalidRequest, match="a pool of its own"):
        HashBlockCache(cache.pool)
    with pytest.raises(InvalidRequest, match="never uses page 0"):
        a_cache(num_pages=1)
    with pytest.raises(OutOfPages, match="99 pages wanted, 8 free"):
        cache.reserve(lease, 16 * 101)
