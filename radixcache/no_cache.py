"""No prefix cache: the baseline, in which no request shares anything with another."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from radixcache.base import PrefixCache, mutation
from radixcache.lease import Lease
from radixcache.pages import PagePool
from radixcache.snapshot import Outline
from radixcache.tokens import Tokens, TokensLike


class NoCache(PrefixCache):
    """Pages without a prefix cache: `acquire` never hits, `release` frees every page.

    >>> cache = NoCache(PagePool(num_pages=8, page_size=4))
    >>> cache.match([1, 2, 3])
    0
    """

    caches = False

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool, granularity=1)

    def _forget_all(self) -> None:
        self._leases: dict[Lease, None] = {}
        self._in_flight: dict[Lease, int] = {}

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return 0

    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return 0

    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> Lease:
        return Lease(self.page_size, len(tokens), namespace, resumed)

    def _reserve(self, lease: Lease, num_tokens: int) -> None:
        wanted = -(-num_tokens // self.page_size) - lease._num_pages
        lease._set_pages(lease._num_pages, self.pool.allocate(wanted))
        lease.capacity = lease._num_pages * self.page_size

    def _publish(self, lease: Lease, tokens: Tokens, written: bool) -> None:
        if not written:
            self._in_flight[lease] = lease.num_tokens
            lease.publishing = True
        self._count(lease)
        lease.num_tokens += len(tokens)

    @mutation
    def rollback(self) -> None:
        for lease, written in self._in_flight.items():
            lease.num_tokens = written
            pages = -(-written // self.page_size)
            self.pool.drop(lease.page_table[pages:].copy())
            lease._num_pages = pages
            lease.capacity = pages * self.page_size
        self._end_step()

    def _release(self, lease: Lease) -> None:
        lease._drop_own(self.pool)

    def _evict(self, num_pages: int) -> int:
        return 0

    def outline(self) -> Outline[Any]:
        never: Any = None  # is never called: there are no nodes
        return Outline({}, never, list, list, dict, never, never, never)

    def check(self) -> None:
        refs = np.zeros(self.pool.num_pages, np.int32)
        for lease in self._leases:
            assert lease._num_own_from == 0 and lease.num_tokens <= lease.capacity
            np.add.at(refs, lease.page_table, 1)
        assert self._in_flight.keys() <= self._leases.keys()
        self.pool.check(refs + self._count_windows())
