"""The nodes of the tree, the leases that stand in them, and the runs of their tokens and pages.

If a look-up compared node by node, a path of a hundred short nodes would take a hundred times as
long as one long node. So nodes that follow each other on a path share a *run*, one buffer of their
tokens and pages: a look-up compares the whole run at once and finds its node by bisection. A split
then moves no token either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from operator import attrgetter
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from radixcache.lease import Lease
from radixcache.pages import Pages
from radixcache.tokens import Tokens

NO_CHILDREN: dict[int, Node] = cast(Any, MappingProxyType({}))
NOBODY: set[RadixLease] = cast(Any, frozenset())
"""Shared by all nodes without leases, most of them leaves: an empty set has 200 bytes."""


class RadixLease(Lease):
    """A lease whose cursor is a place in the tree: `num_tokens` tokens down, inside `node`.

    The lease pins that one node. Its ancestors cannot go either, because only leaves are evicted.
    """

    __slots__ = ("node",)

    def __init__(
        self, node: Node, page_size: int, query_tokens: int, namespace: Hashable, resumed: bool
    ) -> None:
        super().__init__(page_size, query_tokens, namespace, resumed)
        self.node = node


class Node:
    """An edge of the tree and the pages of its tokens; a root is the empty edge [0, 0)."""

    __slots__ = (
        "children",
        "end",
        "last_use",
        "leases",
        "parent",
        "place",
        "run",
        "serial",
        "start",
    )

    def __init__(self, parent: Node | None, run: Run, start: int, end: int) -> None:
        self.parent = parent
        self.children = NO_CHILDREN
        """Children by their first token; see `adopt`."""
        self.run = run
        """Where the tokens and pages are."""
        self.start = start
        self.end = end
        self.last_use = 0
        """Logical time of the last release of a lease here, or in an evicted node below."""
        self.serial = 0
        self.place: tuple[int, int, Node] | None = None
        """Its entry in the eviction order, while it is evictable."""
        self.leases = NOBODY
        """Leases whose cursor is in this node: start < lease.num_tokens <= end; see `enter`."""

    @property
    def tokens(self) -> Tokens:
        """[end - start] the edge's tokens; a view."""
        run = self.run
        return run.data[self.start - run.start : self.end - run.start]

    @property
    def first_token(self) -> int:
        """The key of this node among its parent's children."""
        return self.run.data.item(self.start - self.run.start)

    @property
    def first_page(self) -> int:
        """Index in the page table of `pages[0]`."""
        return self.start // self.run.page_size

    @property
    def num_pages(self) -> int:
        """Pages that cover the edge."""
        page_size = self.run.page_size
        return (self.end - 1) // page_size + 1 - self.start // page_size

    @property
    def pages(self) -> Pages:
        """[num_pages] the pages that cover the edge; a view."""
        run = self.run
        return run.pages(self.start // run.page_size, (self.end - 1) // run.page_size + 1)

    def page_at(self, index: int) -> int:
        """The page that this node holds at `index` of the page table."""
        run = self.run
        return run.data.item(run.room + index - run.start // run.page_size)

    def adopt(self, child: Node) -> None:
        """Make `child` the child under its first token, in place of any other."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[child.first_token] = child
        child.parent = self

    def disown(self, child: Node) -> None:
        """Let go of a child."""
        del self.children[child.first_token]
        child.parent = None
        if not self.children:
            self.children = NO_CHILDREN

    def enter(self, lease: RadixLease) -> None:
        """The cursor of `lease` is in this node now."""
        if self.leases is NOBODY:
            self.leases = set()
        self.leases.add(lease)
        lease.node = self

    def leave(self, lease: RadixLease) -> None:
        """The cursor of `lease` has left this node."""
        self.leases.remove(lease)
        if not self.leases:
            self.leases = NOBODY

    def extend(self, tokens: Tokens, pages: Pages) -> None:
        """Lengthen the edge of a leaf. Amortised O(len)."""
        self.run.append(tokens, pages)
        self.end += len(tokens)

    def truncate(self, end: int) -> Pages:
        """Cut the edge of a leaf to end at `end`, after its start; returns the pages cut off."""
        run, page_size = self.run, self.run.page_size
        cut = run.pages((end - 1) // page_size + 1, (self.end - 1) // page_size + 1)
        self.end = end
        run.shrink()
        return cut


_END = attrgetter("end")
_NOTHING = np.empty(0, np.int32)

_SPARE = 64
"""Tokens for which even a short run may keep room: its Python objects take more memory."""


class Run:
    """Consecutive nodes of one path: each but the first is a child of the one before.

    Attributes:
        start: position of the first token.
        data: the tokens of positions [start, end of the last node), then spare room; from index
            `room` on the pages that cover them, then spare room. One array, since the header of a
            second one is as large as 28 tokens.
        nodes: in order; at least one.

    Args:
        room: make room for so many tokens, if they are more than `tokens`.
    """

    __slots__ = ("data", "nodes", "page_size", "room", "start")

    def __init__(
        self, start: int, tokens: Tokens, pages: Pages, page_size: int, room: int = 0
    ) -> None:
        self.start = start
        self.page_size = page_size
        self.room, end_pages = len(tokens), len(pages)
        if room > self.room:
            end_pages = end_pages * room // self.room + 1
            self.room = room
        self.data: NDArray[np.int32] = np.empty(self.room + end_pages, np.int32)
        self.data[: len(tokens)] = tokens
        self.data[self.room : self.room + len(pages)] = pages
        self.nodes: list[Node] = []

    @property
    def length(self) -> int:
        """Tokens in use."""
        return self.nodes[-1].end - self.start

    @property
    def first_page(self) -> int:
        """Index in the page table of the first page."""
        return self.start // self.page_size

    @property
    def num_pages(self) -> int:
        """Pages in use."""
        return (self.nodes[-1].end - 1) // self.page_size + 1 - self.start // self.page_size

    def pages(self, first: int, end: int) -> Pages:
        """Page table entries [first, end); a view."""
        before = self.room - self.start // self.page_size
        return self.data[before + first : before + end]

    def set_page(self, index: int, page: int) -> None:
        """Set page table entry `index` to `page`."""
        self.data[self.room + index - self.first_page] = page

    def index(self, position: int) -> int:
        """Index of the node that holds the token before `position`. O(log nodes)."""
        return bisect_left(self.nodes, position, key=_END)

    def append(self, tokens: Tokens, pages: Pages) -> None:
        """Put `tokens` and `pages` after all others. Amortised O(len)."""
        length, num_pages, room = self.length, self.num_pages, self.room
        end, end_pages = length + len(tokens), num_pages + len(pages)
        if end > room or room + end_pages > len(self.data):
            before, room = self.data, end * 5 // 4 + 4
            self.data = np.empty(room + end_pages * 5 // 4 + 4, np.int32)
            self.data[:length] = before[:length]
            self.data[room : room + num_pages] = before[self.room : self.room + num_pages]
            self.room = room
        self.data[length:end] = tokens
        self.data[room + num_pages : room + end_pages] = pages

    def adopt(self, nodes: list[Node]) -> None:
        """Take over nodes whose tokens and pages are here already."""
        self.nodes += nodes
        for node in nodes:
            node.run = self

    def cut(self, at: int) -> None:
        """Move the nodes from index `at` on, if any, to a run of their own. O(their length)."""
        if at < len(self.nodes):
            rest = self.nodes[at:]
            start, first_page = rest[0].start, rest[0].first_page
            tokens = self.data[start - self.start : self.length]
            pages = self.pages(first_page, self.first_page + self.num_pages)
            Run(start, tokens, pages, self.page_size).adopt(rest)
            del self.nodes[at:]

    def shrink(self) -> None:
        """Free memory if less than half is in use. Amortised O(1) per token cut off."""
        if 2 * self.length + _SPARE < self.room:
            self.prepend(_NOTHING, _NOTHING)

    def prepend(self, tokens: Tokens, pages: Pages) -> None:
        """Put `tokens` and `pages` before all others, and leave no spare room. O(length)."""
        length, num_pages = self.length, self.num_pages
        old = self.data[:length], self.data[self.room : self.room + num_pages]
        self.data = np.concatenate((tokens, old[0], pages, old[1]))
        self.room = len(tokens) + length
        self.start -= len(tokens)
