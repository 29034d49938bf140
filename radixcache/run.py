"""Where nodes keep their tokens and pages: side by side, path by path.

A look-up that compared node by node would cost one array comparison for each; a path of a hundred
short nodes would take a hundred times as long as one long node. Nodes that follow each other on a
path therefore share a *run*, one buffer of tokens and one of pages, so that a look-up compares the
whole run at once and finds its node by bisection. Splitting a node then moves no token either.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixcache.pages import Pages

if TYPE_CHECKING:
    from radixcache.tree import Node

Tokens = NDArray[np.int32]

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
