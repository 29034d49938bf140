"""The order in which the hash-block cache hands out pages: vLLM's free queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from radixcache.pages import Pages


class FreeQueue:
    """A doubly linked list of the pages that are not in use, cached ones included.

    The head is handed out next; a page that is hit leaves from anywhere in O(1). A lease that has
    only looked so far holds its pages (`refs` counts it) without using them: they keep their place
    in the queue, and `take` skips them.

    >>> refs = np.zeros(5, np.int32)
    >>> queue = FreeQueue(refs)
    >>> refs[1] = 1
    >>> queue.note_held(1)
    >>> queue.take(2).tolist(), len(queue), list(queue)
    ([0, 2], 2, [1, 3, 4])

    Args:
        refs: [num_pages] the pool's holders of each page; all pages are free at first.
    """

    def __init__(self, refs: NDArray[np.int32]) -> None:
        count = len(refs)
        self._refs = refs
        # Index `count` stands before the head and behind the tail: the list is a ring.
        self._next = [*range(1, count + 1), 0]
        self._prev = [count, *range(count)]
        self._end = count
        self._linked = count
        self._held = 0
        self.num_blank = count
        """Pages at the head that were put there without cached content."""

    def __len__(self) -> int:
        """Pages that can be handed out: those in the queue without a holder."""
        return self._linked - self._held

    def __iter__(self) -> Iterator[int]:
        """The whole queue from its head, held pages included."""
        page = self._next[self._end]
        while page != self._end:
            yield page
            page = self._next[page]

    def to_array(self) -> Pages:
        return np.array([page for page in self if not self._refs[page]], np.int32)

    def take(self, count: int) -> Pages:
        """Unlink the first `count` pages without a holder. O(count + held pages on the way)."""
        taken = np.empty(count, np.int32)
        page = self._next[self._end]
        for index in range(count):
            if self._held:
                while self._refs[page]:
                    page = self._next[page]
            taken[index] = page
            following = self._next[page]
            self._unlink(page)
            page = following
        self.num_blank -= min(self.num_blank, count)
        return taken

    def put(self, pages: Pages) -> None:
        """Pages without cached content go to the head. O(len)."""
        self.prepend(pages.tolist())

    def prepend(self, pages: Iterable[int]) -> None:
        """Link `pages` before the head, in their order. O(len)."""
        before = self._linked
        self._link(pages, self._end)
        self.num_blank += self._linked - before

    def append(self, pages: Iterable[int]) -> None:
        """Link `pages` after the tail, in their order. O(len)."""
        self._link(pages, self._prev[self._end])

    def remove(self, pages: Iterable[int]) -> None:
        """Unlink held pages, which are in use from now on, from anywhere. O(len)."""
        for page in pages:
            self._unlink(page)
            self._held -= 1

    def note_held(self, count: int) -> None:
        """`count` more pages of the queue are held (fewer, if negative). O(1)."""
        self._held += count

    def check(self) -> None:
        """Assert that the links agree with each other and with the counts. O(n)."""
        line = [self._end, *self]
        for page, following in zip(line, [*line[1:], self._end], strict=True):
            assert self._next[page] == following and self._prev[following] == page, "broken link"
        assert len(line) == len(set(line)) == self._linked + 1, "the queue is miscounted"
        assert not any(self._refs[page] for page in line[1 : 1 + self.num_blank]), "not blank"
        held = sum(bool(self._refs[page]) for page in line[1:])
        assert held == self._held, f"{held} pages in the queue are held, {self._held} counted"

    def _link(self, pages: Iterable[int], after: int) -> None:
        last = self._next[after]
        for page in pages:
            self._next[after] = page
            self._prev[page] = after
            after = page
            self._linked += 1
        self._next[after] = last
        self._prev[last] = after

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before] = after
        self._prev[after] = before
        self._linked -= 1
