"""A radix tree in whole pages, as SGLang keeps it: what token-exactness is compared with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from radixcache.base import CacheStats, PrefixCache, Tokens, TokensLike, as_tokens
from radixcache.errors import LeaseError
from radixcache.lease import Lease
from radixcache.pages import PagePool
from radixcache.radix import RadixCache, RadixLease

_NOTHING: Tokens = np.empty(0, np.int32)


class PageLease(Lease):
    """A lease in tokens over one in pages."""

    __slots__ = ("inner", "tail")

    def __init__(
        self, page_size: int, query_tokens: int, namespace: Hashable, resumed: bool
    ) -> None:
        super().__init__(page_size, query_tokens, namespace, resumed)
        self.inner: RadixLease
        self.tail = _NOTHING
        """Published tokens after the last whole page; the tree does not know them."""


class PageAlignedRadixCache(PrefixCache):
    """Hits, nodes and evictions in whole pages: a `RadixCache` whose tokens are pages.

    A page of tokens stands in the tree as one symbol, a 32-bit hash of them. Two different pages of
    the same prefix could be taken for one with a chance of 1 in 4 billion, so this is for
    measurements only. Leaves are trimmed page by page as in `RadixCache`; SGLang drops them whole.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.tree = RadixCache(_InPages(pool))
        self._requests = CacheStats()
        self.events = self.tree.events
        self._pins = self.tree._pins
        self._weights = _odd_weights(pool.page_size)
        self.granularity = pool.page_size
        self.pin_budget = self.tree.pin_budget

    @property
    def stats(self) -> CacheStats:  # type: ignore[override]
        """In tokens, as every cache counts."""
        pages = self.tree.stats
        return replace(
            self._requests,
            evicted_tokens=pages.evicted_tokens * self.page_size,
            evicted_pages=pages.evicted_pages,
        )

    def _symbols(self, tokens: Tokens) -> Tokens:
        """One symbol for each whole page. O(len(tokens)), vectorised."""
        whole = len(tokens) // self.page_size
        pages = tokens[: whole * self.page_size].reshape(whole, self.page_size)
        mixed = (pages.astype(np.uint64) + np.uint64(1)) @ self._weights
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)

    def _query(self, tokens: TokensLike) -> Tokens:
        """What to look up: the pages before the last token, and one symbol that is never hit."""
        return np.append(self._symbols(as_tokens(tokens)[:-1]), np.int32(0))

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return self.tree.match(self._query(tokens), namespace) * self.page_size

    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return self.tree.cached_length(self._symbols(as_tokens(tokens)), namespace) * self.page_size

    def acquire(
        self,
        tokens: TokensLike,
        namespace: Hashable = None,
        *,
        resumed: bool = False,
        include_last: bool = False,
    ) -> PageLease:
        lease = PageLease(self.page_size, len(tokens), namespace, resumed)
        lease.inner = self.tree.acquire(self._query(tokens), namespace, resumed=resumed)
        lease.cached_tokens = lease.num_tokens = lease.inner.cached_tokens * self.page_size
        self._read(lease)
        return lease

    def _read(self, lease: PageLease) -> None:
        lease._set_pages(0, lease.inner.page_table)
        lease.capacity = lease.inner.capacity * self.page_size

    def reserve(self, lease: Lease, num_tokens: int) -> None:
        lease = self._mine(lease)
        self.tree.reserve(lease.inner, -(-num_tokens // self.page_size))
        self._read(lease)

    def publish(self, lease: Lease, tokens: TokensLike, *, written: bool = False) -> None:
        lease = self._mine(lease)
        tokens = as_tokens(tokens)
        lease._check_publish(len(tokens))
        lease.num_tokens += len(tokens)
        tokens = np.concatenate((lease.tail, tokens))
        symbols = self._symbols(tokens)
        lease.tail = tokens[len(symbols) * self.page_size :].copy()
        if not lease.used:
            lease.used = lease.inner.used = True  # its hit is used, even if no page gets full
            self._requests.count(lease)
        if len(symbols):
            self.tree.publish(lease.inner, symbols, written=written)
            self._read(lease)

    def commit(self) -> None:
        self.tree.commit()

    def rollback(self) -> None:
        raise NotImplementedError("no step of a replay fails")

    def release(self, lease: Lease) -> None:
        lease = self._mine(lease)
        self.tree.release(lease.inner)
        lease.released = True

    def _release(self, lease: RadixLease) -> None:
        self.tree._release(lease)

    def recover(self) -> None:
        self.tree.recover()

    def _forget_all(self) -> None:
        self.tree._forget_all()

    def evict(self, num_pages: int) -> int:
        return self.tree.evict(num_pages)

    def pin(self, name: str, tokens: TokensLike, namespace: Hashable = None) -> None:
        self.tree.pin(name, self._symbols(as_tokens(tokens)), namespace)

    def reset(self) -> None:
        self.tree.reset()
        self._requests = CacheStats()

    def check(self) -> None:
        self.tree.check()

    def _mine(self, lease: Lease) -> PageLease:
        if lease.released or not isinstance(lease, PageLease):
            raise LeaseError("the lease was released, or belongs to another cache")
        return lease


class _InPages(PagePool):
    """The pages of another pool, each one token long."""

    def __init__(self, pool: PagePool) -> None:
        self.num_pages = pool.num_pages
        self.page_size = 1
        self.refs = pool.refs
        self.free = pool.free


def _odd_weights(count: int) -> np.ndarray:
    """Fixed multipliers that make the sum of a page's tokens depend on their order."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
