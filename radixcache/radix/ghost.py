"""A ghost index: it remembers which tokens were cached, without any KV.

Ghost lists, which remember what a cache evicted, come from Megiddo and Modha's ARC (2003).
"""

from __future__ import annotations

from collections.abc import Hashable

from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.tokens import TokensLike, as_tokens


class GhostIndex(RadixCache):
    """A radix tree that is told which tokens were computed, and forgets the oldest of them.

    At page size 1 no branch begins in mid-page: nothing is copied, every token counts once.

    Args:
        num_tokens: how many to remember; some 20 bytes each.

    >>> ghost = GhostIndex(num_tokens=8)
    >>> ghost.remember([1, 2, 3, 4])
    >>> ghost.match([1, 2, 3, 5])
    3
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(PagePool(num_tokens, page_size=1))

    def remember(self, tokens: TokensLike, namespace: Hashable = None) -> None:
        """Note that `tokens` were computed, as many as fit. Amortised O(len(tokens))."""
        if not self.idle:  # an earlier call was cut off
            self.recover()
        tokens = as_tokens(tokens)[: self.pool.num_pages]
        lease = self.acquire(tokens, namespace, include_last=True)
        if lease.num_tokens < len(tokens):
            self.reserve(lease, len(tokens))
            self.publish(lease, tokens[lease.num_tokens :], written=True)
        else:
            self.touch(lease)
        self.release(lease)
