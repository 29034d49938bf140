"""The nodes of the tree, and the runs in which they keep their tokens and pages.

A look-up that compared node by node would cost one array comparison for each; a path of a hundred
short nodes would take a hundred times as long as one long node. Nodes that follow each other on a
path therefore share a *run*, one buffer of tokens and one of pages, so that a look-up compares the
whole run at once and finds its node by bisection. Splitting a node then moves no token either.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixcache.pages import Pages

Tokens = NDArray[np.int32]

NO_STEP = -1

_GLANCE = 256
"""Tokens compared before all the rest are: most mismatches come early."""


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two equally long, non-empty arrays. O(n), vectorised."""
    if len(a) > 2 * _GLANCE:
        same = common_length(a[:_GLANCE], b[:_GLANCE])
        if same < _GLANCE:
            return same
    different = a != b
    first = int(different.argmax())
    return first if different[first] else len(a)


class Cursor(Protocol):
    """What the tree knows of a lease: a place `num_tokens` tokens down, inside `node`."""

    num_tokens: int
    node: Node


class Node:
    """An edge of the tree and the pages of its tokens; a root is the empty edge [0, 0)."""

    __slots__ = (
        "children",
        "created",
        "end",
        "first_page",
        "last_use",
        "leases",
        "num_pages",
        "parent",
        "priority",
        "run",
        "serial",
        "start",
        "step",
        "uses",
        "written",
    )

    def __init__(
        self, parent: Node | None, run: Run, start: int, end: int, first_page: int, num_pages: int
    ) -> None:
        self.parent = parent
        self.children: dict[int, Node] = {}
        """Children by their first token."""
        self.run = run
        """Where the tokens and pages are."""
        self.start = start
        self.end = end
        self.first_page = first_page
        """Index in the page table of `pages[0]`: start // page_size."""
        self.num_pages = num_pages
        self.step = NO_STEP
        """The step that wrote to this node last."""
        self.written = 0
        """While that step is in flight: positions below this one are written."""
        self.last_use = 0
        self.created = 0
        self.uses = 0
        self.priority = 0
        self.serial = 0
        self.leases: set[Cursor] = set()
        """Leases whose cursor is in this node: start < lease.num_tokens <= end."""

    @property
    def tokens(self) -> Tokens:
        """[end - start] the edge's tokens; a view."""
        run = self.run
        return run.tokens[self.start - run.start : self.end - run.start]

    @property
    def first_token(self) -> int:
        """The token under which the parent knows this node."""
        return self.run.tokens.item(self.start - self.run.start)

    @property
    def pages(self) -> Pages:
        """[num_pages] the pages that cover the edge; a view."""
        first = self.first_page - self.run.first_page
        return self.run.pages[first : first + self.num_pages]

    def page_at(self, index: int) -> int:
        """The page that this node holds at `index` of the page table."""
        return self.run.pages.item(index - self.run.first_page)

    def extend(self, tokens: Tokens, pages: Pages) -> None:
        """Append to the edge of a leaf. Amortised O(len)."""
        self.run.append(tokens, pages)
        self.end += len(tokens)
        self.num_pages += len(pages)

    def truncate(self, end: int, num_pages: int) -> Pages:
        """Cut the edge of a leaf to end at `end` with `num_pages` pages; returns those cut off."""
        cut = self.pages[num_pages:].copy()
        self.end = end
        self.num_pages = num_pages
        self.run.shrink()
        return cut


_END = attrgetter("end")


class Run:
    """Consecutive nodes of one path: each but the first is a child of the one before.

    Attributes:
        start: position of the first token.
        first_page: index of the first page in the page table, ``start // page_size``.
        tokens: positions [start, end of the last node), then spare room.
        pages: those that cover them, then spare room.
        nodes: in order; at least one.
    """

    __slots__ = ("first_page", "nodes", "pages", "start", "tokens")

    def __init__(self, start: int, tokens: Tokens, first_page: int, pages: Pages) -> None:
        self.start = start
        self.tokens = tokens
        self.first_page = first_page
        self.pages = pages
        self.nodes: list[Node] = []

    @property
    def length(self) -> int:
        """Tokens in use."""
        return self.nodes[-1].end - self.start

    @property
    def num_pages(self) -> int:
        """Pages in use."""
        last = self.nodes[-1]
        return last.first_page + last.num_pages - self.first_page

    def index(self, position: int) -> int:
        """Index of the node that holds the token before `position`. O(log nodes)."""
        return bisect_left(self.nodes, position, key=_END)

    def append(self, tokens: Tokens, pages: Pages) -> None:
        """Put `tokens` and `pages` after all others. Amortised O(len)."""
        used = self.length
        self.tokens = _with_room(self.tokens, used, len(tokens))
        self.tokens[used : used + len(tokens)] = tokens
        if len(pages):
            used = self.num_pages
            self.pages = _with_room(self.pages, used, len(pages))
            self.pages[used : used + len(pages)] = pages

    def prepend(self, start: int, tokens: Tokens, first_page: int, pages: Pages) -> None:
        """Put `tokens` and `pages` before all others. O(length)."""
        self.tokens = np.concatenate((tokens, self.tokens[: self.length]))
        self.pages = np.concatenate((pages, self.pages[: self.num_pages]))
        self.start = start
        self.first_page = first_page

    def adopt(self, nodes: list[Node]) -> None:
        """Take over nodes whose tokens and pages are here already."""
        self.nodes += nodes
        for node in nodes:
            node.run = self

    def cut(self, at: int) -> None:
        """Give the nodes from index `at` on, if any, a run of their own. O(their length)."""
        if at < len(self.nodes):
            first = self.nodes[at]
            tokens = self.tokens[first.start - self.start : self.length].copy()
            pages = self.pages[first.first_page - self.first_page : self.num_pages].copy()
            rest = self.nodes[at:]
            del self.nodes[at:]
            Run(first.start, tokens, first.first_page, pages).adopt(rest)

    def shrink(self) -> None:
        """Give back memory if less than half is in use: amortised O(1) per token cut off."""
        if self.length < len(self.tokens) // 2:
            self.tokens = self.tokens[: self.length].copy()
            self.pages = self.pages[: self.num_pages].copy()


def _with_room(buffer: NDArray[np.int32], used: int, count: int) -> NDArray[np.int32]:
    if used + count <= len(buffer):
        return buffer
    grown = np.empty((used + count) * 5 // 4 + 4, np.int32)
    grown[:used] = buffer[:used]
    return grown
