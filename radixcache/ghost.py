"""A memory of what was cached, with no KV behind it.

Ghost lists, which remember what a cache has evicted, come from Megiddo and Modha's ARC (2003).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from radixcache.base import Tokens, TokensLike, as_tokens, mutation
from radixcache.nodes import Node
from radixcache.pages import PagePool
from radixcache.radix import RadixCache


@dataclass(eq=False, slots=True)
class _Place:
    """Where tokens are being added: what leads there cannot go."""

    node: Node
    num_tokens: int


class GhostIndex(RadixCache):
    """A radix tree that is told what somebody computed, and forgets what was told longest ago.

    At page size 1 no branch begins in mid-page: nothing is copied, every token counts once. Nothing
    is ever in flight, and nobody needs a page table, so that it takes no lease to remember.

    Args:
        num_tokens: how many to remember; some 20 bytes each.

    >>> ghost = GhostIndex(num_tokens=8)
    >>> ghost.remember([1, 2, 3, 4])
    >>> ghost.match([1, 2, 3, 5])
    3
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(PagePool(num_tokens, page_size=1))

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        root = self._tree.find_root(namespace)
        return 0 if root is None else self._tree.descend(root, 0, as_tokens(tokens)[:-1])[1]

    def remember(self, tokens: TokensLike, namespace: Hashable = None) -> None:
        """All of `tokens` is cached there, as far as they fit. O(len(tokens)), amortised."""
        if self.broken:  # a call was cut off
            self.recover()
        tokens = as_tokens(tokens)[: self.pool.num_pages]
        if len(tokens):
            self._remember(tokens, namespace)

    @mutation
    def _remember(self, tokens: Tokens, namespace: Hashable) -> None:
        tree = self._tree
        node, position = tree.descend(tree.root(namespace), 0, tokens)
        if position < node.end:  # what follows keeps its time
            node = tree.split(node, position)
        else:
            self._order.discard(node)
        if position < len(tokens):
            node = self._add(node, position, tokens[position:])
        self._clock += 1
        node.last_use = self._clock
        tree.straighten(node)
        self._settle(node)

    def _add(self, node: Node, position: int, tokens: Tokens) -> Node:
        """Remember what follows `node`, which ends at `position`; returns the leaf."""
        place = _Place(node, position)
        node.enter(place)
        self._evict(len(tokens) - self.pool.num_free)
        pages = self.pool.allocate(len(tokens))
        node.leave(place)
        if node.children or node.parent is None:
            return self._tree.add_child(node, tokens, pages, 0)
        node.extend(tokens, pages)
        return node
