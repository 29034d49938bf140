"""One whole request on a cache, for tests of single facts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from radixcache import Lease, PageCopy, PrefixCache
from radixcache.snapshot import MAX_NODES, CachedNode, Look
from tests.index.model import SENTINEL


def begin(
    cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None, **options: Any
) -> Any:
    """A lease on all of `tokens`; what was not found is in flight."""
    lease = cache.acquire(tokens, namespace, **options)
    cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens[lease.num_tokens :])
    return lease


def append(cache: PrefixCache, lease: Lease, tokens: Sequence[int]) -> list[PageCopy]:
    """One step that writes `tokens` for `lease` alone; the copies it needed."""
    cache.reserve(lease, lease.num_tokens + len(tokens))
    cache.publish(lease, tokens)
    copies = lease.take_copies()
    cache.commit()
    cache.check()
    return copies


def put(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> int:
    """One whole request; how many of its tokens were found."""
    lease = begin(cache, tokens, namespace)
    lease.take_copies()
    cache.commit()
    cache.release(lease)
    cache.check()
    hit: int = lease.cached_tokens
    return hit


def length(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> int:
    """How much of `tokens` is found, the last token included."""
    return cache.match([*tokens, SENTINEL], namespace)


def table(cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    """The pages of the cached prefix of `tokens`."""
    lease = cache.acquire([*tokens, SENTINEL])
    pages: list[int] = lease.page_table.tolist()
    cache.release(lease)
    return pages


def snapshot(cache: PrefixCache) -> dict[Hashable, CachedNode]:
    """The whole picture of a cache."""
    picture = cache.outline().draw(Look(rows=MAX_NODES))
    assert picture is not None
    return picture.roots
