"""Counters of a cache: requests, hits, evictions."""

from __future__ import annotations

from dataclasses import dataclass

from radixcache.lease import Lease


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
    loaded_tokens: int = 0
    """Tokens whose KV was loaded from a lower tier."""

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hit, 0.0 before the first request."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        counts = vars(other)
        return CacheStats(**{name: count + counts[name] for name, count in vars(self).items()})

    def count(self, lease: Lease) -> None:
        """Count an admitted lease."""
        if lease.resumed:
            self.resumed_query_tokens += lease.query_tokens
            self.resumed_hit_tokens += lease.cached_tokens
        else:
            self.requests += 1
            self.query_tokens += lease.query_tokens
            self.hit_tokens += lease.cached_tokens
