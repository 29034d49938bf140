"""The eviction order: leaves without a lease, least recently used first.

They stand in a sorted list, so that taking the next one, adding one and removing one are O(log n)
at any size of the tree: no scan, no heap to rebuild.
"""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedList

from radixcache.nodes import Node


class EvictionOrder:
    """The evictable leaves by `last_use`, equal ones by age."""

    def __init__(self) -> None:
        self._places: SortedList[tuple[int, int, Node]] = SortedList()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Node]:
        return (place[2] for place in self._places)

    def add(self, leaf: Node) -> None:
        """Make `leaf` evictable, if it was not. O(log n)."""
        if leaf.place is None:
            leaf.place = (leaf.last_use, leaf.serial, leaf)
            self._places.add(leaf.place)

    def discard(self, leaf: Node) -> None:
        """Make `leaf` not evictable, if it was. O(log n)."""
        if leaf.place is not None:
            self._places.remove(leaf.place)
            leaf.place = None

    def first(self) -> Node | None:
        """The leaf to evict next. O(1)."""
        return next(iter(self), None)

    def discard_first(self) -> None:
        """Take out the leaf to evict next, without the search of `discard`. O(log n)."""
        self._places.pop(0)[2].place = None

    def check(self) -> None:
        """Assert that each leaf stands at its place, by the time of its last use."""
        for last_use, serial, leaf in self._places:
            assert leaf.place is not None and leaf.place[2] is leaf, "a leaf lost its place"
            assert (last_use, serial) == (leaf.last_use, leaf.serial), "a leaf was used meanwhile"
