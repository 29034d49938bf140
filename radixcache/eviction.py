"""Which leaf goes first.

A leaf that nobody leases stands in a sorted container under its key, so that taking the next one,
adding one and removing one are O(log n) at any size of the tree: no scan, no heap to rebuild.
"""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict

from radixcache.tree import Node


class EvictionOrder:
    """The evictable leaves, least recently used first; equal times go by age of the node."""

    def __init__(self) -> None:
        self._leaves: SortedDict[tuple[int, int], Node] = SortedDict()

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves.values())

    def __contains__(self, leaf: Node) -> bool:
        return self._leaves.get((leaf.last_use, leaf.serial)) is leaf

    def add(self, leaf: Node) -> None:
        """Make `leaf` evictable; its `last_use` must not change while it is. O(log n)."""
        self._leaves[leaf.last_use, leaf.serial] = leaf

    def discard(self, leaf: Node) -> None:
        """Make `leaf` not evictable, if it was. O(log n)."""
        self._leaves.pop((leaf.last_use, leaf.serial), None)

    def first(self) -> Node | None:
        """The leaf to evict next. O(log n)."""
        return self._leaves.peekitem(0)[1] if self._leaves else None
