"""The pool of KV pages: their numbers and reference counts, without their bytes."""

from __future__ import annotations

from operator import index
from typing import Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest, OutOfPages

Pages = NDArray[np.int32]
"""Page numbers, one-dimensional int32."""


def as_count(number: SupportsIndex, what: str) -> int:
    """Convert a whole number to int; `InvalidRequest` if it is none."""
    try:
        return index(number)
    except TypeError:
        raise InvalidRequest(f"{what} must be a whole number, not {repr(number)[:80]}") from None


class FreePages(Protocol):
    """The pages without a holder, in the order in which they are handed out."""

    def __len__(self) -> int: ...
    @property
    def num_blank(self) -> int:
        """How many of them hold nothing that can be found, and are handed out first."""

    def take(self, count: int) -> Pages: ...
    def put(self, pages: Pages) -> None: ...
    def to_array(self) -> Pages: ...


class FreeStack:
    """Hands out the page that was freed last: it is likely still in a CPU's cache."""

    def __init__(self, num_pages: int) -> None:
        self._stack: Pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._len = num_pages

    def __len__(self) -> int:
        return self._len

    num_blank = property(__len__)

    def take(self, count: int) -> Pages:
        self._len -= count
        return self._stack[self._len : self._len + count][::-1].copy()

    def put(self, pages: Pages) -> None:
        self._stack[self._len : self._len + len(pages)] = pages[::-1]
        self._len += len(pages)

    def to_array(self) -> Pages:
        return self._stack[: self._len][::-1].copy()


_ONE = np.array(1, np.int32)
"""NumPy would make an array of a plain 1 each time."""


class PagePool:
    """`num_pages` pages of `page_size` tokens, each free or held by one or more holders.

    A holder is a tree node that references the page or a lease that may use it. The free pages
    form a stack, unless the cache that uses the pool puts an order of its own in `free`.

    >>> pool = PagePool(num_pages=4, page_size=16)
    >>> pages = pool.allocate(3)
    >>> pages.tolist(), pool.num_free
    ([0, 1, 2], 1)
    >>> pool.hold(1)
    >>> pool.drop(pages)  # page 1 still has a holder
    2
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        num_pages = as_count(num_pages, "the number of pages")
        page_size = as_count(page_size, "the size of a page")
        if not 0 < num_pages < 2**31 or not 0 < page_size < 2**31:
            raise InvalidRequest(
                "a pool has at least one page of one token, and less than 2^31 of either, not "
                f"{num_pages} of {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.refs: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        """[num_pages] holders of each page; 0 means free."""
        self.free: FreePages = FreeStack(num_pages)

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return len(self.free)

    def allocate(self, count: int) -> Pages:
        """`count` free pages, each now with one holder, or `OutOfPages`. O(count)."""
        if count > len(self.free):
            raise OutOfPages(f"{count} pages wanted, {len(self.free)} free of {self.num_pages}")
        pages = self.free.take(count)
        self.refs.put(pages, 1)  # half the time of an assignment
        return pages

    def hold(self, page: int) -> None:
        """Add a holder to a page in use. O(1)."""
        self.refs[page] += 1

    def drop(self, pages: Pages) -> int:
        """Take one holder from each of `pages` (distinct); returns how many became free. O(len)."""
        refs, freed = self.refs, pages
        if len(pages) == 1:  # often, and numpy takes as long for one page as for a hundred
            page = pages.item()
            left = refs[page] = refs.item(page) - 1
            if left:
                return 0
        else:
            lefts = refs.take(pages) - _ONE
            refs.put(pages, lefts)
            if np.count_nonzero(lefts):
                freed = pages[lefts == 0]
        self.free.put(freed)
        return len(freed)

    def clear(self) -> None:
        """Free every page, held or not, into a new stack. O(pages)."""
        self.refs[:] = 0
        self.free = FreeStack(self.num_pages)

    def check(self, expected_refs: NDArray[np.int32]) -> None:
        """Assert that the counts are `expected_refs`, and the free pages those without holder."""
        wrong = np.flatnonzero(self.refs != expected_refs)
        assert not len(wrong), (
            f"pages {wrong[:8].tolist()} have {self.refs[wrong[:8]].tolist()} holders, "
            f"counted {expected_refs[wrong[:8]].tolist()}"
        )
        free = self.free.to_array()
        assert len(free) == len(self.free), "the free pages are miscounted"
        assert np.array_equal(np.sort(free), np.flatnonzero(self.refs == 0)), (
            "free pages != unheld pages"
        )
