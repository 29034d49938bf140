"""Leases: the cursors through which requests hold pages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from radixcache.errors import LeaseError
from radixcache.pages import PagePool, Pages


class PageCopy(NamedTuple):
    """Copy the first `num_slots` slots of page `source` into page `target` before the step."""

    source: int
    target: int
    num_slots: int


NO_PAGES: Pages = np.empty(0, np.int32)


class WindowTable:
    """A lease's pages of the windowed layers: the tokens from `first` on, a multiple of the page
    size.

    Attributes:
        shared_slots: used slots of the last page, while it is others', too; 0 if it is not.
        copies: to run before the step (`Lease.take_window_copies`).
        copied: the page that they read, held until the step has run.
        whole: the length from which on the window is whole; tokens before are computed for their
            windows alone, and the full layers' pages that they lie in are not written.
        known: the length up to which others can find its whole pages.
        near: the tokens before the prompt's end, whose pages are worth more than others.
    """

    __slots__ = ("copied", "copies", "first", "known", "near", "pages", "shared_slots", "whole")

    def __init__(self, first: int, pages: Pages, shared_slots: int = 0, whole: int = 0) -> None:
        self.first, self.pages, self.shared_slots = first, pages, shared_slots
        self.whole, self.known, self.near = whole, first, (0, 0)
        self.copies: list[PageCopy] = []
        self.copied: Pages = NO_PAGES


class Lease:
    """A request's cursor into the cache, and its page table.

    `PrefixCache.acquire` makes it, the cache's methods move it, `release` ends it::

        page table   [ shared ... shared | own ... own ]
                       held by the cache   held by the lease, to write what follows the cursor
        tokens       [ 0 ........... num_tokens ) ......... room for more

    A half-filled page at the cursor is the lease's own as soon as `reserve` has claimed or copied
    it; the cache may hold it too, for the slots before the cursor.
    """

    __slots__ = (
        "_copies",
        "_num_own_from",
        "_num_pages",
        "_table",
        "cached_tokens",
        "capacity",
        "ended",
        "namespace",
        "next_step_tokens",
        "num_tokens",
        "page_size",
        "publishing",
        "query_tokens",
        "released",
        "resumed",
        "used",
        "window",
    )

    def __init__(
        self, page_size: int, query_tokens: int, namespace: Hashable = None, resumed: bool = False
    ) -> None:
        self.namespace, self.page_size = namespace, page_size
        self.num_tokens = 0
        """Length of the prefix that is cached or published; the next publish starts here."""
        self.cached_tokens = 0
        """The hit: tokens that `acquire` found or `RadixCache.load` brought. Lower it before the
        first publish if some are computed all the same, so that the statistics leave them out."""
        self.next_step_tokens = 0
        """How much longer the hit would be after the step being scheduled: by the tokens in flight
        in a half-filled page, which cannot be copied before they are written."""
        self.capacity = 0
        """Tokens that the page table has room for: beyond it, `reserve` first."""
        self.query_tokens = query_tokens
        self.resumed = resumed
        self.used = False
        """It has published, or was touched: it counts in the statistics and in the LRU order."""
        self.publishing = False
        """It has published in the step being scheduled, which writes those tokens."""
        self.released = self.ended = False
        self.window: WindowTable | None = None
        """Its pages of the layers with a window, if these are kept apart."""
        self._table: Pages = np.empty(query_tokens // page_size + 2, np.int32)
        self._num_pages = 0
        self._num_own_from = 0
        self._copies: list[PageCopy] = []

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.num_tokens} tokens"
        return f"<Lease {state}, {self.cached_tokens} cached, {self._num_pages} pages>"

    @property
    def page_table(self) -> Pages:
        """Pages of positions [0, capacity), int32. A view: valid until the cache's next call."""
        return self._table[: self._num_pages]

    def take_copies(self) -> list[PageCopy]:
        """The page copies to run before the step does, all sources read before any target is
        written; empties the list."""
        copies, self._copies = self._copies, []
        return copies

    def take_window_copies(self) -> list[PageCopy]:
        """As `take_copies`, for pages of windowed layers, if these are kept apart."""
        if self.window is None or not self.window.copies:
            return []
        copies, self.window.copies = self.window.copies, []
        return copies

    # What follows is for the caches.

    def _set_pages(self, start: int, pages: Pages) -> None:
        """Write `pages` into the table from index `start` and end the table there."""
        end = start + len(pages)
        if end > len(self._table):
            table = np.empty(max(end, 2 * len(self._table)), np.int32)
            table[:start] = self._table[:start]
            self._table = table
        self._table[start:end] = pages
        self._num_pages = end

    def _drop_own(self, pool: PagePool) -> None:
        """Return the lease's own pages to the pool; the table ends before them."""
        if self._num_own_from < self._num_pages:
            pool.drop(self._table[self._num_own_from : self._num_pages])
            self._num_pages = self._num_own_from

    def _check_publish(self, count: int) -> None:
        if self.publishing:
            raise LeaseError("a lease publishes once per step: commit or roll back first")
        if count < 1:
            raise LeaseError("publish needs at least one token")
        if self.num_tokens + count > self.capacity:
            raise LeaseError(
                f"publishing {count} tokens after {self.num_tokens} needs a reserve of "
                f"{self.num_tokens + count}, the lease holds {self.capacity}"
            )
