"""Pictures of a cache for people to look at: small trees, whose nodes have lasting ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

PREVIEW = 24
"""Tokens of a node that a picture shows."""

FIRST_PREVIEW = 4 * PREVIEW
"""`PREVIEW` of a first node, which may begin with a chat template's text of all conversations."""

MAX_DEPTH = 100
"""Levels of a picture: nested formats are read by recursion."""

MAX_NODES = 50_000
"""Nodes that are visited, level by level; a picture leaves out what is below the others."""

ROOT = ""
"""The id of the empty prefix, where each namespace begins."""

T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """Which part of a cache to draw.

    Attributes:
        rows: leaves that there is room for; children that fold take one of them together.
        levels: nodes in a row, from parent to child, that there is room for.
        under: id of the node to begin with; without it, every namespace is drawn from its root.
        reveal: id of a node that is drawn in any case.
    """

    rows: int = 500
    levels: int = MAX_DEPTH
    under: str | None = None
    reveal: str | None = None


@dataclass(frozen=True)
class Folded:
    """Sibling branches that a picture leaves out, and their content; `age` and `leases` as in
    `CachedNode`."""

    branches: int
    nodes: int
    tokens: int
    leases: int
    age: int


@dataclass(eq=False)
class CachedNode:
    """The tokens that the prefixes below a node have in common; the root of a namespace has none.

    Attributes:
        id: the same in all pictures, for as long as the node lives.
        start: position of the first token.
        tokens: its first `PREVIEW` tokens, or `FIRST_PREVIEW`.
        age: logical time since the node or one below was last used, 0 while a lease is there. Only
            comparisons within one picture mean something.
        leases: leases that end here or below, without pins.
        computed_from: the first position, perhaps before the node, that one of these leases
            computes or has computed, not hit; None if all have hit the whole node.
        pins: names of the pinned prefixes that end here.
        pinned: whether a pinned prefix goes through the node.
        children: oldest first.
        more: the children that the picture leaves out.
    """

    id: str
    start: int = 0
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    age: int = 0
    leases: int = 0
    computed_from: int | None = None
    pins: list[str] = field(default_factory=list)
    pinned: bool = False
    children: list[CachedNode] = field(default_factory=list)
    more: Folded | None = None


@dataclass(frozen=True)
class Picture:
    """The part of the tree that a `Look` shows.

    Attributes:
        roots: the roots of the namespaces that are drawn.
        above: the nodes between the root and `Look.under`, without children.
        more: the namespaces that the picture leaves out, as branches.
        num_nodes, num_tokens: of the whole cache.
    """

    roots: dict[Hashable, CachedNode]
    above: list[CachedNode]
    more: Folded | None
    num_nodes: int
    num_tokens: int


class Ends(NamedTuple):
    """The leases and pins that end in a node: the hit of each lease, the name of each pin."""

    leases: Collection[int] = ()
    pins: Collection[str] = ()


class Spelled(NamedTuple):
    """A node and all its tokens; `parent` is the index of its parent among the others, or -1."""

    id: str
    parent: int
    tokens: NDArray[np.int32]


class Outline(Generic[T]):
    """The nodes of a cache, from which pictures are drawn; valid until the cache changes. O(nodes).

    Args:
        tops: the nodes of each namespace without a parent, oldest first.
        below: the children of a node, oldest first.
        sizes: the number of tokens of each of the nodes.
        ages: logical time since each of the nodes was last used itself.
        ends: the leases and pins that end in the nodes, by index, where there are any.
        name: the id of a node.
        start: the position of a node's first token.
        tokens: [num_tokens] of a node; a view.
    """

    def __init__(
        self,
        tops: Mapping[Hashable, Iterable[T]],
        below: Callable[[T], Collection[T]],
        sizes: Callable[[list[T]], list[int]],
        ages: Callable[[list[T]], list[int]],
        ends: Callable[[list[T]], dict[int, Ends]],
        name: Callable[[T], str],
        start: Callable[[T], int],
        tokens: Callable[[T], NDArray[np.int32]],
    ) -> None:
        self._name, self._start, self._tokens = name, start, tokens
        self._namespaces = [*tops]
        # An index below `_first` stands for a namespace's root, the others for nodes, level by
        # level: a parent comes first, and its children are those in [_begin[at], _begin[at + 1]).
        self._first = first = len(tops)
        self._nodes: list[T] = []
        self._begin = [first]
        for top in tops.values():
            self._nodes.extend(top)
            self._begin.append(first + len(self._nodes))
        nodes, begin = self._nodes, self._begin
        for node in nodes:  # the list grows meanwhile
            if (children := below(node)) and len(nodes) < MAX_NODES:
                nodes.extend(children)
            begin.append(first + len(nodes))
        self._size = [0] * first + sizes(nodes)
        self._ends = {at + first: end for at, end in ends(nodes).items()}
        self._seen: set[int] = set()  # the path to the node that must be drawn
        self._add_up([0] * first + ages(nodes))

    def _add_up(self, ages: list[int]) -> None:
        """Sum up each node and those below: nodes, tokens and leaves; age, leases and pins."""
        begin, size = self._begin, len(self._size)
        self._age = ages
        self._count = count = [1] * size
        self._sum = tokens = self._size.copy()
        self._leaves = leaves = [1] * size
        self._parents = [-1] * size
        for at in range(size - 1, -1, -1):
            first, end = begin[at], begin[at + 1]
            if first == end:
                continue
            count[at] += sum(count[first:end])
            tokens[at] += sum(tokens[first:end])
            leaves[at] = sum(leaves[first:end])
            youngest = min(ages[first:end])
            if youngest < ages[at] or at < self._first:
                ages[at] = youngest
            self._parents[first:end] = [at] * (end - first)
        self._leases: dict[int, list[int]] = {}
        self._pinned: set[int] = set()
        for at, (leases, pins) in self._ends.items():
            for above in self._path(at):
                if leases:
                    self._leases.setdefault(above, []).extend(leases)
                    ages[above] = 0
                if pins:
                    self._pinned.add(above)

    def _path(self, at: int) -> list[int]:
        """The nodes from one up to its root."""
        path = []
        while at >= 0:
            path.append(at)
            at = self._parents[at]
        return path

    def find(self, node: str) -> int | None:
        """The index of the node with that id. O(nodes)."""
        for at, other in enumerate(self._nodes, self._first):
            if self._name(other) == node:
                return at
        return None

    def draw(self, look: Look) -> Picture | None:
        """The picture; None if there is no node `look.under`.

        Where there is room, all children are drawn; else those used last. Spare rows are shared
        evenly among those that can use them.
        """
        top = self.find(look.under) if look.under is not None else None
        if look.under is not None and top is None:
            return None
        revealed = self.find(look.reveal) if look.reveal is not None else None
        self._seen = set(self._path(revealed)) if revealed is not None else set()
        roots = range(self._first) if top is None else [self._path(top)[-1]]
        rooms, more = self._share([*roots], look.rows)
        drawn = {}
        for root, rows in rooms.items():
            if top is None:
                drawn[self._namespaces[root]] = self._draw(root, rows, look.levels)
            else:
                drawn[self._namespaces[root]] = picture = self._describe(root)
                picture.children.append(self._draw(top, rows, look.levels - 1))
        above = self._path(top)[-2:0:-1] if top is not None else []
        return Picture(
            roots=drawn,
            above=[self._describe(at) for at in above],
            more=more,
            num_nodes=len(self._nodes),
            num_tokens=sum(self._size),
        )

    def spell(self) -> list[Spelled]:
        """Every node, a parent before its children, independent of later changes."""
        first, parents = self._first, self._parents
        return [
            Spelled(self._name(node), max(parents[at] - first, -1), self._tokens(node).copy())
            for at, node in enumerate(self._nodes, first)
        ]

    def _draw(self, at: int, rows: int, levels: int) -> CachedNode:
        picture = self._describe(at)
        children = range(self._begin[at], self._begin[at + 1])
        rooms, picture.more = self._share(children, rows) if levels else ({}, self._fold(children))
        picture.children = [self._draw(child, room, levels - 1) for child, room in rooms.items()]
        return picture

    def _share(self, nodes: Sequence[int], rows: int) -> tuple[dict[int, int], Folded | None]:
        """The rows that each of these siblings gets, and those that fold."""
        if len(nodes) > rows:
            seen, leases, age = self._seen, self._leases, self._age
            ranked = sorted(nodes, key=lambda at: (at not in seen, at not in leases, age[at]))
            must = [at for at in ranked[:1] if at in seen or at in leases]
            shown = ranked[: rows - 1] or must
        else:
            shown = [*nodes]
        kept = set(shown)
        folded = [at for at in nodes if at not in kept]
        left = max(0, rows - len(shown) - bool(folded))
        rooms = {}
        for rank, at in enumerate(sorted(shown, key=self._leaves.__getitem__)):
            extra = min(self._leaves[at] - 1, left // (len(shown) - rank))
            rooms[at] = 1 + extra
            left -= extra
        return dict(sorted(rooms.items())), self._fold(folded)

    def _fold(self, nodes: Sequence[int]) -> Folded | None:
        if not nodes:
            return None
        roots = sum(at < self._first for at in nodes)  # roots do not count as nodes
        return Folded(
            branches=len(nodes),
            nodes=sum(self._count[at] for at in nodes) - roots,
            tokens=sum(self._sum[at] for at in nodes),
            leases=sum(len(self._leases.get(at, ())) for at in nodes),
            age=min(self._age[at] for at in nodes),
        )

    def _describe(self, at: int) -> CachedNode:
        """A node without its children."""
        age, leases, pinned = self._age[at], self._leases.get(at, []), at in self._pinned
        if at < self._first:
            return CachedNode(id=ROOT, age=age, leases=len(leases), pinned=pinned)
        node, size = self._nodes[at - self._first], self._size[at]
        start = self._start(node)
        computed_from = min(leases, default=start + size)
        return CachedNode(
            id=self._name(node),
            start=start,
            num_tokens=size,
            tokens=self._tokens(node)[: PREVIEW if start else FIRST_PREVIEW].tolist(),
            age=age,
            leases=len(leases),
            computed_from=computed_from if computed_from < start + size else None,
            pins=sorted(self._ends[at].pins) if at in self._ends else [],
            pinned=pinned,
        )
