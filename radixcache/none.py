"""The baseline: no request shares anything with another."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from radixcache.base import (
    CacheStats,
    PrefixCache,
    TokensLike,
    as_namespace,
    as_tokens,
    mutation,
)
from radixcache.errors import LeaseError, PinError
from radixcache.events import Listener
from radixcache.lease import Lease
from radixcache.pages import PagePool, as_count
from radixcache.snapshot import Outline


class NoCache(PrefixCache):
    """Pages without a prefix cache: every `acquire` hits nothing, every `release` frees all.

    >>> cache = NoCache(PagePool(num_pages=8, page_size=4))
    >>> cache.match([1, 2, 3])
    0
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.granularity = 0
        self.stats = CacheStats()
        self.events: list[Listener] = []
        self.pin_budget = 0
        self._forget_all()

    def _forget_all(self) -> None:
        self._leases: dict[Lease, None] = {}
        self._pins = {}
        self._in_flight: dict[Lease, int] = {}

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return 0

    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return 0

    @mutation
    def acquire(
        self,
        tokens: TokensLike,
        namespace: Hashable = None,
        *,
        resumed: bool = False,
        include_last: bool = False,
    ) -> Lease:
        tokens, namespace = as_tokens(tokens), as_namespace(namespace)
        lease = Lease(self.page_size, len(tokens), namespace, resumed)
        self._leases[lease] = None
        return lease

    @mutation
    def reserve(self, lease: Lease, num_tokens: int) -> None:
        self._mine(lease)
        num_tokens = as_count(num_tokens, "the number of tokens")
        wanted = -(-num_tokens // self.page_size) - lease._num_pages
        if wanted > 0:
            lease._set_pages(lease._num_pages, self.pool.allocate(wanted))
            lease.capacity = lease._num_pages * self.page_size

    @mutation
    def publish(self, lease: Lease, tokens: TokensLike, *, written: bool = False) -> None:
        self._mine(lease)
        tokens = as_tokens(tokens)
        lease._check_publish(len(tokens))
        if lease in self._in_flight:
            raise LeaseError("a lease publishes once per step: commit or roll back first")
        if not written:
            self._in_flight[lease] = lease.num_tokens
        if not lease.used:
            lease.used = True
            self.stats.count(lease)
        lease.num_tokens += len(tokens)

    @mutation
    def commit(self) -> None:
        self._in_flight.clear()

    @mutation
    def rollback(self) -> None:
        for lease, written in self._in_flight.items():
            lease.num_tokens = written
            pages = -(-written // self.page_size)
            self.pool.drop(lease.page_table[pages:].copy())
            lease._num_pages = pages
            lease.capacity = pages * self.page_size
        self._in_flight.clear()

    @mutation
    def release(self, lease: Lease) -> None:
        self._mine(lease)
        if lease in self._in_flight:
            raise LeaseError("the lease has tokens in flight: commit or roll back first")
        self._release(lease)

    def _release(self, lease: Lease) -> None:
        lease._drop_own(self.pool)
        lease.released = True
        del self._leases[lease]

    @mutation
    def evict(self, num_pages: int) -> int:
        return 0

    @mutation
    def pin(self, name: str, tokens: TokensLike, namespace: Hashable = None) -> None:
        raise PinError(f"{name!r} cannot be pinned: this engine runs without a prefix cache")

    def outline(self) -> Outline[Any]:
        never: Any = None  # asked about a node: there is none
        return Outline({}, never, list, list, dict, never, never, never)

    @mutation
    def reset(self) -> None:
        if self._leases:
            raise LeaseError(f"{len(self._leases)} leases live: release first")
        self.stats = CacheStats()

    def check(self) -> None:
        refs = np.zeros(self.pool.num_pages, np.int32)
        for lease in self._leases:
            assert lease._num_own_from == 0 and lease.num_tokens <= lease.capacity
            np.add.at(refs, lease.page_table, 1)
        assert self._in_flight.keys() <= self._leases.keys()
        self.pool.check(refs)

    def _mine(self, lease: Lease) -> None:
        if not isinstance(lease, Lease) or lease not in self._leases:
            raise LeaseError("the lease was released, or belongs to another cache")
