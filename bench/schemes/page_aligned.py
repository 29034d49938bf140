"""A radix tree in whole pages, as SGLang keeps it: what token-exactness is compared with."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import numpy as np

from radixcache.lease import Lease
from radixcache.no_cache import NoCache
from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.radix.nodes import RadixLease
from radixcache.tokens import Tokens, TokensLike, as_tokens


class PageLease(Lease):
    """A lease in tokens over one in pages.

    `tail` are published tokens after the last whole page; the tree does not know them.
    """

    __slots__ = ("inner", "tail")
    inner: RadixLease
    tail: Tokens


class PageAlignedRadixCache(NoCache):
    """Hits, nodes and evictions in whole pages: a `RadixCache` whose tokens are pages.

    A page of tokens stands in the tree as one symbol, a 32-bit hash of them. Two different pages of
    the same prefix could be taken for one with a chance of 1 in 4 billion, so this is for
    measurements only. Leaves are trimmed page by page as in `RadixCache`; SGLang drops them whole.
    """

    def __init__(self, pool: PagePool) -> None:
        self.tree = RadixCache(_InPages(pool))
        self._weights = _odd_weights(pool.page_size)
        super().__init__(pool)
        self.granularity = pool.page_size

    def _forget_all(self) -> None:
        super()._forget_all()
        self.tree._forget_all()

    def _symbols(self, tokens: Tokens) -> Tokens:
        """One symbol for each whole page. O(len(tokens)), vectorised."""
        whole = len(tokens) // self.page_size
        pages = tokens[: whole * self.page_size].reshape(whole, self.page_size)
        mixed = (pages.astype(np.uint64) + np.uint64(1)) @ self._weights
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)

    def _query(self, tokens: TokensLike) -> Tokens:
        """The key to look up: the pages before the last token, and one symbol that is never hit."""
        return np.append(self._symbols(as_tokens(tokens)[:-1]), np.int32(0))

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return self.tree.match(self._query(tokens), namespace) * self.page_size

    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return self.tree.cached_length(self._symbols(as_tokens(tokens)), namespace) * self.page_size

    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> PageLease:
        lease = PageLease(self.page_size, len(tokens), namespace, resumed)
        inner = self.tree.acquire(self._query(tokens), namespace, resumed=resumed)
        lease.inner = cast(RadixLease, inner)
        lease.tail = np.empty(0, np.int32)
        lease.cached_tokens = lease.num_tokens = lease.inner.cached_tokens * self.page_size
        self._read(lease)
        return lease

    def _read(self, lease: PageLease) -> None:
        """Take over what the tree has done."""
        lease._set_pages(0, lease.inner.page_table)
        lease.capacity = lease.inner.capacity * self.page_size
        self.stats.evicted_pages = self.tree.stats.evicted_pages
        self.stats.evicted_tokens = self.tree.stats.evicted_tokens * self.page_size

    def reserve(self, lease: Any, num_tokens: int) -> None:
        self.tree.reserve(self._mine(lease).inner, -(-num_tokens // self.page_size))
        self._read(lease)

    def publish(self, lease: Any, tokens: TokensLike, *, written: bool = False) -> None:
        super().publish(lease, tokens, written=written)
        self.tree._count(lease.inner)  # its hit is used, even if no page gets full
        tokens = np.concatenate((lease.tail, as_tokens(tokens)))
        symbols = self._symbols(tokens)
        lease.tail = tokens[len(symbols) * self.page_size :].copy()
        if len(symbols):
            self.tree.publish(lease.inner, symbols, written=written)
            self._read(lease)

    def commit(self) -> None:
        self.tree.commit()
        super().commit()

    def rollback(self) -> None:
        raise NotImplementedError("no step of a replay fails")

    def _release(self, lease: Any) -> None:
        self.tree.release(lease.inner)

    def evict(self, num_pages: int) -> int:
        return self.tree.evict(num_pages)

    def _forget_cached(self) -> None:
        self.tree.reset()

    def check(self) -> None:
        self.tree.check()


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
