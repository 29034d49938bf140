"""Which leaf goes first.

A leaf that nobody leases stands in a sorted list under its key, so that taking the next one, adding
one and removing one are O(log n) at any size of the tree: no scan, no heap to rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sortedcontainers import SortedList

from radixcache.nodes import Node

EvictionPolicy = Callable[[Node], Any]
"""The key of an evictable leaf; the smallest goes first, equal ones by age.

Any two keys can be compared, and none is a NaN. If they cannot, or if the function raises, that
comes out of the change of the cache under way, which is then broken until `PrefixCache.recover`.

Read when a leaf becomes evictable. It may look at these, which are then true of each of the leaf's
tokens, and which do not change while it is evictable:

- `last_use`: logical time at which the last request that had the tokens in its path ended;
- `uses`: how many of these have ended, and `priority`, the highest of theirs;
- `created`: logical time of the first token that was stored by the request that stored these.

A scan-resistant policy, for example, is ``lambda leaf: (leaf.uses > 1, leaf.last_use)``.
"""

POLICIES: dict[str, EvictionPolicy] = {
    "lru": lambda leaf: leaf.last_use,
    "lfu": lambda leaf: (leaf.uses, leaf.last_use),
    "fifo": lambda leaf: leaf.created,
    "priority": lambda leaf: (leaf.priority, leaf.last_use),
}

Boundary = Callable[[Node, int, float], bool]
"""Whether a stem and its only tail must stay two nodes, so that the policy can tell them apart.

Called with the stem, and with `created` and `priority` of the tail, -inf before any use. All who
use the tail use the stem, too, so that the two differ in `uses` only if somebody ended between.
`last_use`, which every policy may read, is not its business (`RadixTree.mergeable`).
"""

BOUNDARIES: dict[str, Boundary] = {
    "lru": lambda stem, created, priority: False,
    "lfu": lambda stem, created, priority: stem.uses > 0,
    "fifo": lambda stem, created, priority: stem.created != created,
    "priority": lambda stem, created, priority: stem.priority > priority,
}


def any_boundary(stem: Node, created: int, priority: float) -> bool:
    """The `Boundary` of a policy that may read anything."""
    return stem.uses > 0 or stem.created != created  # who has a priority has been used


class EvictionOrder:
    """The evictable leaves in the order of a policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy
        self._places: SortedList[tuple[Any, int, Node]] = SortedList()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Node]:
        return (place[2] for place in self._places)

    def add(self, leaf: Node) -> None:
        """Make `leaf` evictable, if it was not. O(log n)."""
        if leaf.place is None:
            leaf.place = (self._key(leaf), leaf.serial, leaf)
            self._places.add(leaf.place)

    def discard(self, leaf: Node) -> None:
        """Make `leaf` not evictable, if it was. O(log n)."""
        if leaf.place is not None:
            self._places.remove(leaf.place)
            leaf.place = None

    def first(self) -> Node | None:
        """The leaf to evict next. O(1)."""
        for _, _, leaf in self._places:
            return leaf
        return None

    def discard_first(self) -> None:
        """Make that leaf not evictable: `discard` would look for it first. O(log n)."""
        self._places.pop(0)[2].place = None

    def check(self) -> None:
        """Assert that every place is that of its leaf, under the key that it has now."""
        for key, serial, leaf in self._places:
            assert leaf.place is not None and leaf.place[2] is leaf, "a leaf lost its place"
            assert (key, serial) == (self._key(leaf), leaf.serial), "a key has changed"
