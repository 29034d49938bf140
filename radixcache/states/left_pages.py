"""Pages of windows that sequences have left behind: free, but found until they are used anew.

A page of the windowed layers that falls behind its window is free, as its sequence does not need it
any more. What it holds is still right until it is handed out again, so it is handed out late, and a
prompt that resumes there takes it back. vLLM's free queue keeps the blocks of full layers in this
way; here the free pages of windows go before anything that is cached on purpose.

A page of the full layers is held for one path of tokens only, so its number stands for the whole
prefix: a table says which pages of windows hold the same tokens as each page of the full layers. No
digest is taken and no token compared, and prompts of other namespaces have other pages.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.pages import PagePool, Pages

Indexes = NDArray[np.integer[Any]]

FAR, NEAR = 1, 2
"""Ranks of pages with something to find: far from the end of a prompt, or before it."""


class LeftPages:
    """The free pages of a pool, blank ones before those of windows, and a table of which page of a
    window is *beside* which page of the full layers.

    A window's page number j holds the tokens [j * page_size, (j + 1) * page_size). It is beside the
    page of the full layers that holds the last of them: beside that of the first, two branches of
    the tree would compete for one entry.

    Args:
        pool: its free pages come from this object from now on.
        page_size: tokens per page of the windowed layers.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self.page_size = pool, page_size
        self._blank = pool.free
        if isinstance(pool.free, LeftPages):  # nothing is found any more
            self._blank = pool.free._blank
            self._blank.put(pool.free._left())
        pool.free = self
        self._queues: dict[int, OrderedDict[int, None]] = {FAR: OrderedDict(), NEAR: OrderedDict()}
        """Free pages by rank, the first freed first."""
        self._ranks: NDArray[np.int8] = np.zeros(pool.num_pages, np.int8)
        """[num_pages] 0, unless the page was entered since it was handed out last."""
        self._clock = 0
        """Counts what makes entries out of date."""
        self._taken: NDArray[np.int64] = np.zeros(pool.num_pages, np.int64)
        """[num_pages] when a page of either kind was handed out last: it has other tokens since."""
        shape = pool.num_pages, -(-pool.page_size // page_size)
        self._beside: NDArray[np.int32] = np.zeros(shape, np.int32)
        """[num_pages, most] the window's pages beside each page of the full layers."""
        self._entered: NDArray[np.int64] = np.full(shape, -1, np.int64)
        """When they were put there; an entry holds if neither page was handed out after that."""

    # -- the free pages of the pool ------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._blank) + self.num_left

    @property
    def num_left(self) -> int:
        """Free pages in which something may be found."""
        return sum(map(len, self._queues.values()))

    @property
    def num_blank(self) -> int:
        return self._blank.num_blank

    def take(self, count: int) -> Pages:
        """Blank pages first, then those of low rank, the first freed first, then cached ones."""
        pages = self._blank.take(min(count, self._blank.num_blank))
        for queue in self._queues.values():
            wanted = min(count - len(pages), len(queue))
            if wanted:
                left = [queue.popitem(last=False)[0] for _ in range(wanted)]
                pages = np.concatenate([pages, np.array(left, np.int32)])
        if len(pages) < count:
            pages = np.concatenate([pages, self._blank.take(count - len(pages))])
        self._note_taken(pages)
        return pages

    def _note_taken(self, pages: Pages) -> None:
        """Nothing is found in `pages` from now on."""
        self._clock += 1
        self._taken[pages], self._ranks[pages] = self._clock, 0

    def put(self, pages: Pages) -> None:
        ranks = self._ranks[pages]
        for rank, queue in self._queues.items() if ranks.any() else ():
            queue.update(dict.fromkeys(pages[ranks == rank].tolist()))
        self._blank.put(pages[ranks == 0])

    def to_array(self) -> Pages:
        return np.concatenate([self._blank.to_array(), self._left()])

    def _left(self) -> Pages:
        return np.array([page for queue in self._queues.values() for page in queue], np.int32)

    # -- what they hold ------------------------------------------------------------------------

    def take_back(self, pages: Pages) -> None:
        """Let free pages that were found have one holder; what they hold stays. O(len(pages))."""
        for page, rank in zip(pages.tolist(), self._ranks[pages].tolist(), strict=True):
            del self._queues[rank][page]
        self._pool.refs[pages] = 1

    def change(self, page: int) -> None:
        """Other tokens than before are about to be written into a part of a page in use."""
        self._clock += 1
        self._taken[page] = self._clock

    def enter(self, table: Pages, numbers: Indexes, pages: Pages, near: tuple[int, int]) -> None:
        """Let the window's pages of these `numbers`, which are in use, be found. O(len(pages)).

        Args:
            table: the page table of the full layers.
            near: the tokens before a prompt's end, whose pages are handed out last.
        """
        rows, columns = self._places(numbers)
        rows = table[rows]
        new = ~self._holds(rows, columns)
        rows, columns, pages, numbers = rows[new], columns[new], pages[new], numbers[new]
        self._beside[rows, columns], self._entered[rows, columns] = pages, self._clock
        ends = (numbers + 1) * self.page_size
        self._ranks[pages] = np.where((ends > near[0]) & (ends <= near[1]), NEAR, FAR)

    def find(self, table: Pages, num_tokens: int, window: int) -> tuple[int, Pages]:
        """The deepest whole window within the first `num_tokens` tokens that ends with a page: the
        number of its first page, and its pages. O(num_tokens / page_size)."""
        numbers = np.arange(num_tokens // self.page_size)
        rows, columns = self._places(numbers)
        rows = table[rows]
        gaps = np.where(self._holds(rows, columns), -1, numbers)
        run = numbers - np.maximum.accumulate(gaps)
        wanted = -(-(window - 1) // self.page_size)
        ends = np.flatnonzero(run >= np.minimum(numbers + 1, wanted))
        if not len(ends):
            return 0, self._beside[:0, 0]
        end = int(ends[-1]) + 1
        window_of = slice(max(0, end - wanted), end)
        return window_of.start, self._beside[rows[window_of], columns[window_of]]

    def _places(self, numbers: Indexes) -> tuple[Indexes, Indexes]:
        """The index in the page table of the full layers that each page of a window is beside, and
        its number among those beside the same."""
        full = self._pool.page_size
        rows = ((numbers + 1) * self.page_size - 1) // full
        return rows, numbers - rows * full // self.page_size

    def _holds(self, rows: Indexes, columns: Indexes) -> NDArray[np.bool_]:
        """Which entries are up to date."""
        taken = np.maximum(self._taken[rows], self._taken[self._beside[rows, columns]])
        return taken <= self._entered[rows, columns]

    def entries(self) -> tuple[Pages, NDArray[np.intp], Pages]:
        """All that are up to date: pages of the full layers, numbers beside them, and the window's
        pages. O(pages)."""
        rows, columns = np.divmod(np.arange(self._beside.size), self._beside.shape[1])
        holds = self._holds(rows, columns)
        rows, columns = rows[holds], columns[holds]
        return rows.astype(np.int32), columns, self._beside[rows, columns]

    def check(self, held: NDArray[np.bool_]) -> None:
        """Assert that each free page is blank or in the queue of its rank, and that what can be
        found is in pages that windows hold, as in `held`, or that are in a queue."""
        blank, findable = self._blank.to_array(), held.copy()
        assert not self._ranks[blank].any(), "a page with something to find is blank"
        for rank, queue in self._queues.items():
            pages = np.array([*queue], np.int32)
            assert (self._ranks[pages] == rank).all(), "a free page is in another rank's queue"
            assert not self._pool.refs[pages].any(), "a page in use is free"
            findable[pages] = True
        _, _, pages = self.entries()
        assert findable[pages].all() and self._ranks[pages].all(), "a page was found that is gone"
