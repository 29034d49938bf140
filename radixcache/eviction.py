"""Which leaf goes first.

A leaf that nobody leases stands in a sorted container under its key, so that taking the next one,
adding one and removing one are O(log n) at any size of the tree: no scan, no heap to rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sortedcontainers import SortedDict

from radixcache.nodes import Node

EvictionPolicy = Callable[[Node], Any]
"""The key of an evictable leaf; the smallest goes first, equal ones by age.

Read when a leaf becomes evictable; what it may look at does not change while the leaf is:
`last_use` and `created` (logical times), `uses` (leases that ended in the node or below),
`priority` (the highest of those leases). A scan-resistant policy, for example, is
``lambda leaf: (leaf.uses > 1, leaf.last_use)``.
"""

POLICIES: dict[str, EvictionPolicy] = {
    "lru": lambda leaf: leaf.last_use,
    "lfu": lambda leaf: (leaf.uses, leaf.last_use),
    "fifo": lambda leaf: leaf.created,
    "priority": lambda leaf: (leaf.priority, leaf.last_use),
}


class EvictionOrder:
    """The evictable leaves in the order of a policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy
        self._leaves: SortedDict[tuple[Any, int], Node] = SortedDict()
        self._first: Node | None = None  # trimming asks for the same leaf again and again

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves.values())

    def __contains__(self, leaf: Node) -> bool:
        return self._leaves.get((self._key(leaf), leaf.serial)) is leaf

    def add(self, leaf: Node) -> None:
        """Make `leaf` evictable. O(log n)."""
        self._first = None
        self._leaves[self._key(leaf), leaf.serial] = leaf

    def discard(self, leaf: Node) -> None:
        """Make `leaf` not evictable, if it was. O(log n)."""
        self._first = None
        self._leaves.pop((self._key(leaf), leaf.serial), None)

    def first(self) -> Node | None:
        """The leaf to evict next. O(log n), O(1) if asked again."""
        if self._first is None and self._leaves:
            self._first = self._leaves.peekitem(0)[1]
        return self._first
