"""radixcache, as its own scheduler drives it."""

from __future__ import annotations

import radixcache
from bench.peers.index.base import Index, Tokens
from radixcache import PagePool, RadixCache


class Ours(Index):
    """`RadixCache` over a pool of `num_tokens` tokens."""

    version = radixcache.__version__

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(PagePool(num_tokens // page_size, page_size))

    def query(self, tokens: Tokens) -> Tokens:
        return tokens

    def match(self, query: Tokens) -> int:
        return self.cache.match(query)

    def borrow(self, query: Tokens) -> int:
        lease = self.cache.acquire(query)
        pages = lease.page_table
        self.cache.release(lease)
        return len(pages)

    def store(self, tokens: Tokens) -> None:
        lease = self.cache.acquire(tokens)
        self.cache.reserve(lease, len(tokens))
        self.cache.publish(lease, tokens[lease.num_tokens :])
        self.cache.commit()
        self.cache.release(lease)

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(num_tokens // self.page_size)
