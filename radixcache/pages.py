"""The pool of KV pages: numbers and reference counts, no bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import OutOfPages

Pages = NDArray[np.int32]
"""Page numbers, one-dimensional int32."""


class PagePool:
    """`num_pages` pages of `page_size` tokens, each free or held by one or more holders.

    A holder is a tree node that references the page or a lease that may write to it. The free
    pages form a stack, so that a page freed last, and likely still in a CPU's cache, is used first.

    >>> pool = PagePool(num_pages=4, page_size=16)
    >>> pages = pool.allocate(3)
    >>> pages.tolist(), pool.num_free
    ([0, 1, 2], 1)
    >>> pool.hold(1)
    >>> pool.drop(pages)  # page 1 still has a holder
    2
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"a pool needs at least one page of one token, not {num_pages} of {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.refs: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        """[num_pages] holders of each page; 0 means free."""
        self._stack: Pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self.num_free = num_pages

    def allocate(self, count: int) -> Pages:
        """`count` free pages, each now with one holder. O(count).

        Raises:
            OutOfPages: fewer are free; none is taken.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} free")
        top = self.num_free
        pages = self._stack[top - count : top][::-1].copy()
        self.num_free = top - count
        self.refs[pages] = 1
        return pages

    def hold(self, page: int) -> None:
        """Add a holder to a page in use. O(1)."""
        self.refs[page] += 1

    def drop(self, pages: Pages) -> int:
        """Take one holder from each of `pages` (distinct); returns how many became free. O(len)."""
        self.refs[pages] -= 1
        freed = pages[self.refs[pages] == 0]
        count = len(freed)
        self._stack[self.num_free : self.num_free + count] = freed[::-1]
        self.num_free += count
        return count

    def check(self, expected_refs: NDArray[np.int32]) -> None:
        """Assert that the counts are `expected_refs` and that the free pages are the unheld."""
        wrong = np.flatnonzero(self.refs != expected_refs)
        assert not len(wrong), (
            f"pages {wrong[:8].tolist()} have {self.refs[wrong[:8]].tolist()} holders, "
            f"counted {expected_refs[wrong[:8]].tolist()}"
        )
        free = np.sort(self._stack[: self.num_free])
        assert np.array_equal(free, np.flatnonzero(self.refs == 0)), "free list != unheld pages"
