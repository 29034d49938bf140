"""A tier below the pool whose loads and saves take no time: the hits that a disk would add."""

from __future__ import annotations

from radixcache.errors import OutOfPages
from radixcache.pages import PagePool, Pages
from radixcache.radix.cache import RadixCache
from radixcache.runtime.kv_offload.page_loader import NO_LOADS, PageLoader
from radixcache.runtime.request import Sequence
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPages
from radixcache.tokens import Tokens


class NoBytes:
    """A store that keeps no bytes."""

    def save(self, pages: Pages, stored: StoredPages) -> None:
        stored.finish("stored")

    def clear(self) -> None:
        pass


def with_tier(pool: PagePool, times: int) -> RadixCache:
    """A radix cache over a tier of `times` as many pages as its pool."""
    cache = RadixCache(pool)
    cache.lower = LowerTier(times * pool.num_pages, pool.page_size, NoBytes())
    return cache


class InstantLoads(PageLoader):
    """Loads a tier's pages into the pool before the request is looked up."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache

    def waits(self, sequence: Sequence) -> bool:
        load(self._cache, sequence.tokens)
        return False


def load(cache: RadixCache, tokens: Tokens) -> int:
    """Load the tier's part of a prompt; returns how many tokens."""
    tier, lease = cache.lower, cache.acquire(tokens)
    assert tier is not None
    start = lease.num_tokens
    pages, end = tier.find(tokens[:-1], start)
    tier.begin_load(pages)
    try:
        if end > start:
            cache.reserve(lease, end)
            cache.load(lease, tokens[start:end])
    except OutOfPages:
        pass
    loaded = lease.num_tokens - start
    tier.end_load(pages, loaded and end - start // tier.page_size * tier.page_size)
    cache.release(lease)
    return loaded


def instant_loads(cache: object) -> PageLoader:
    """The loader for a scheduler over `cache`, which may have no tier."""
    if isinstance(cache, RadixCache) and cache.lower is not None:
        return InstantLoads(cache)
    return NO_LOADS
