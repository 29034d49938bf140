"""The interface of every prefix cache, and the lease through which a request holds its pages.

A cache maps token prefixes to KV pages. It knows pages by number and never touches their bytes:
whoever owns the KV tensors copies and writes them. One request lives like this::

    lease = cache.acquire(prompt)                  # pin the longest cached prefix
    cache.reserve(lease, len(prompt))              # make room for the suffix
    cache.publish(lease, prompt[lease.num_tokens:])  # others may share it from now on
    ...                                            # copy lease.take_copies(), run the model
    cache.commit()                                 # the step ran: what it published is written
    ...                                            # one reserve/publish/commit for each decoded token
    cache.release(lease)                           # stays cached until evicted

The token at absolute position p of a sequence lives in slot ``p % page_size`` of page
``lease.page_table[p // page_size]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.events import Listener
from radixcache.pages import PagePool

Tokens = NDArray[np.int32]
"""Token ids, one-dimensional int32."""

TokensLike = Tokens | Sequence[int]
"""What the interface accepts; anything but an int32 array is converted once, at the boundary."""


def as_tokens(tokens: TokensLike) -> Tokens:
    """`tokens` as a one-dimensional int32 array; no copy if it is one already."""
    return np.asarray(tokens, dtype=np.int32)


class PageCopy(NamedTuple):
    """Copy the first `num_slots` slots of page `source` into page `target`, before the step runs."""

    source: int
    target: int
    num_slots: int


@dataclass
class CacheStats:
    """Counters since the last `reset`. Tokens count once per lease, at its first `publish`.

    A lease acquired with ``resumed=True`` (a request put back after preemption) counts in the two
    ``resumed_`` fields instead, so that preemption cannot flatter the hit rate.
    """

    requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0
    evicted_tokens: int = 0
    evicted_pages: int = 0
    copied_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hit, 0.0 before the first request."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class Lease(ABC):
    """One request's hold on cached and private pages: its cursor and its receipt of ownership.

    Made by `PrefixCache.acquire`, moved by the cache's other methods, dead after `release`.
    """

    __slots__ = ("cached_tokens", "namespace", "num_tokens", "released")

    namespace: Hashable
    num_tokens: int
    """Length of the prefix whose KV is cached or published; the next publish starts here."""
    cached_tokens: int
    """Tokens that were found instead of computed: the hit of `acquire` plus later `advance` gains."""
    released: bool

    @property
    @abstractmethod
    def page_table(self) -> NDArray[np.int32]:
        """Pages of positions [0, capacity), int32. A view: valid until the cache's next call."""

    @abstractmethod
    def take_copies(self) -> list[PageCopy]:
        """The page copies that must run before the step does, oldest first; empties the list."""


class PrefixCache(ABC):
    """A map from token prefixes to KV pages; one instance serves one engine, from one thread.

    Everything published since the last `commit` is *in flight*: it belongs to the step being
    scheduled. Others may share it at once, because within each layer a step writes all new K/V
    before attention reads any, but only in whole pages, because a copy would run too early.
    """

    pool: PagePool
    stats: CacheStats
    events: list[Listener]
    """Callables that receive each `Stored`, `Evicted` and `Cleared`; see `radixcache.events`."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pool.page_size

    @abstractmethod
    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """Number of leading tokens that `acquire` would find now. Changes nothing.

        At most ``len(tokens) - 1``: one token must be computed to get logits.
        """

    @abstractmethod
    def acquire(
        self, tokens: TokensLike, namespace: Hashable = None, *, resumed: bool = False
    ) -> Lease:
        """Pin the longest cached prefix of `tokens` (at most all but the last) and return its lease.

        Touches neither statistics nor eviction order until the first `publish`.
        """

    @abstractmethod
    def advance(self, lease: Lease, tokens: TokensLike) -> int:
        """Move `lease` over the longest prefix of `tokens` that follows its cursor in the cache.

        `tokens` are those still to be computed; all but the last may be found. Returns how many
        were, which is how a chunked prefill profits from what another request published meanwhile.
        Pages reserved beyond the cursor go back to the pool when the cursor moves.
        """

    @abstractmethod
    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Grow the page table to hold `num_tokens` tokens, evicting if needed.

        A shared half-filled page at the cursor is appended to in place if nobody has written past
        the cursor, else replaced by a copy, which `Lease.take_copies` reports.

        Raises:
            OutOfPages: free and evictable pages do not suffice; nothing has changed.
        """

    @abstractmethod
    def publish(self, lease: Lease, tokens: TokensLike) -> None:
        """Append `tokens`, whose KV the step being scheduled writes; others may share them now.

        Where the cache holds the same tokens already, whole duplicate pages are freed and the
        lease's table points at the cached ones when the call returns. O(len(tokens)).

        Raises:
            LeaseError: fewer tokens are reserved.
        """

    @abstractmethod
    def commit(self) -> None:
        """The step was executed (or enqueued in order on its device): nothing is in flight."""

    @abstractmethod
    def rollback(self) -> None:
        """The step failed: un-publish everything in flight.

        Each lease moves back to the last position whose KV is written; its reserved pages beyond
        and its pending copies are gone.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Unpin; what was published stays cached until evicted, reserved pages are freed.

        Raises:
            LeaseError: it was released before, or has tokens in flight (commit or rollback first).
        """

    @abstractmethod
    def pin(self, name: str, tokens: TokensLike, namespace: Hashable = None) -> None:
        """Keep the cached prefix `tokens` from eviction until `unpin(name)`.

        Raises:
            PinError: the name exists, the prefix is not cached in full, or the pages of all pins
                together would exceed the budget.
        """

    @abstractmethod
    def unpin(self, name: str) -> None:
        """Drop a pin; `PinError` if there is none of that name."""

    @property
    @abstractmethod
    def pins(self) -> dict[str, int]:
        """Pinned tokens by name."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything cached and zero the statistics; `LeaseError` while a lease or pin lives."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; `AssertionError` names the one that broke. O(everything)."""
