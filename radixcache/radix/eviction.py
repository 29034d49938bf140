"""The eviction order: leaves without a lease, least recently used first.

They stand in a sorted list, so that taking the next one, adding one and removing one are O(log n)
at any size of the tree: no scan, no heap to rebuild.

What is known beats what is guessed: tokens that a waiting prompt is about to find are passed over,
and if there are no others, those go first that are wanted last (Belady's rule, as far as the queue
tells the future).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from sortedcontainers import SortedList

from radixcache.radix.nodes import Node
from radixcache.radix.tree import RadixTree
from radixcache.tokens import Tokens

MOST_COMING = 128
"""Waiting prompts whose tokens are passed over: looking each one up takes some microseconds."""


NextPrompts = Callable[[int], Iterable[tuple[Tokens, Hashable]]]
"""Gives the first prompts that wait, up to so many."""


class Want(NamedTuple):
    """The first waiting prompt that will find a node's tokens, and up to which of them any does."""

    turn: int
    end: int


class EvictionOrder:
    """The evictable leaves of a tree by `last_use`, equal ones by age."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._places: SortedList[tuple[int, int, Node]] = SortedList()
        self.wants: dict[Node, Want] | None = None
        """What waiting prompts will find; None if they are yet to be looked up in this step."""

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

    def victim(self, next_prompts: NextPrompts) -> tuple[Node, int] | None:
        """The leaf to evict next, and how many of its first pages to leave; None without a leaf.
        O(1), O(1) more for each leaf that is passed over, and a look-up of each prompt once a step.
        """
        if self.wants is None:
            self._look_up(next_prompts(MOST_COMING))
        wants, page_size = self.wants or {}, self._tree.page_size
        last, latest = None, -1
        for leaf in self:
            want = wants.get(leaf)
            if want is None:
                return leaf, 0
            left = max(0, -(-want.end // page_size) - leaf.first_page)
            if left < leaf.num_pages:
                return leaf, left
            if want.turn > latest:
                last, latest = leaf, want.turn
        return None if last is None else (last, 0)

    def _look_up(self, prompts: Iterable[tuple[Tokens, Hashable]]) -> None:
        self.wants = {}
        for turn, (tokens, namespace) in enumerate(prompts):
            node, end = self._tree.look_up(tokens, namespace)
            while node is not None and node.parent is not None:
                known = self.wants.get(node, Want(turn, 0))
                if known.end >= end:  # so it is above
                    break
                self.wants[node] = Want(known.turn, end)
                node, end = node.parent, node.start

    def note_merge(self, node: Node, child: Node) -> None:
        """`child` is about to absorb `node`."""
        if self.wants and node in self.wants:
            turn, end = self.wants.pop(node)
            self.wants[child] = Want(turn, self.wants.get(child, Want(turn, end)).end)

    def check(self) -> None:
        """Assert that each leaf stands at its place, by the time of its last use."""
        for last_use, serial, leaf in self._places:
            assert leaf.place is not None and leaf.place[2] is leaf, "a leaf lost its place"
            assert (last_use, serial) == (leaf.last_use, leaf.serial), "a leaf was used meanwhile"
