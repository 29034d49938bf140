"""Pages in a tier below the pool, and what the tier and its store tell each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple, Protocol

from radixcache.pages import Pages
from radixcache.tokens import Tokens

Medium = Literal["host", "disk"]
State = Literal["writing", "stored", "lost"]


@dataclass(eq=False, slots=True)
class StoredPage:
    """A page of a tier.

    Attributes:
        slot: the slot of the store that has its bytes.
        parent: digest of all tokens before the page.
        key: digest of all tokens up to its end.
        tokens: [1 to page_size] int32, the tokens in it.
        state: "writing" until the store has its bytes, "lost" if it never will.
        readers: loads under way, which keep its slot.
        group: the pages with which it was last used, for the tier's eviction order.
    """

    slot: int
    parent: bytes
    key: bytes
    tokens: Tokens
    state: State = "writing"
    readers: int = 0
    group: PageGroup | None = None

    @property
    def is_of_window(self) -> bool:
        """Whether it is of a window (`states.stored_windows`), whose tokens are no text's."""
        return self.tokens.item(0) < 0


class StoredPages:
    """Pages that are saved together. Its methods may be called in any thread."""

    def __init__(self, pages: list[StoredPage]) -> None:
        self._pages = pages

    def pages(self) -> list[StoredPage]:
        """All of the pages, always as the same list."""
        return self._pages

    def finish(self, state: State) -> None:
        """Set the state of all pages, from the thread that saves them."""
        for page in self._pages:
            page.state = state


class StoredRun(StoredPages):
    """Pages that left the pool together, in the order of their path.

    All but the first are made when one of them is asked for: most are evicted before that.

    Args:
        slots: one for each page.
        tokens: those of all pages.
        before: the digest of all tokens before them.
    """

    def __init__(self, slots: list[int], tokens: Tokens, before: blake2b, page_size: int) -> None:
        self.slots, self.tokens = slots, tokens
        self._before, self._page_size = before, page_size
        self._state: State = "writing"
        self.first = next(self._make())
        self._made: dict[None, list[StoredPage]] = {}
        """The first list that a thread has made; no lock, since a fork could copy a held one."""

    def finish(self, state: State) -> None:
        self._state = state
        for page in self._made.get(None, [self.first]):
            page.state = state

    def pages(self) -> list[StoredPage]:
        pages = self._made.get(None)
        if pages is None:
            pages = self._made.setdefault(None, [self.first, *islice(self._make(), 1, None)])
        return pages

    def _make(self) -> Iterator[StoredPage]:
        size, digest = self._page_size, self._before.copy()
        key = digest.digest()
        for at, slot in enumerate(self.slots):
            piece = self.tokens[at * size : (at + 1) * size].copy()
            digest.update(piece)
            parent, key = key, digest.digest()
            yield StoredPage(slot, parent, key, piece, self._state)


@dataclass(eq=False, slots=True)
class PageGroup:
    """Pages of one path that were last used together; the last of them is evicted first.

    Attributes:
        order: the eviction order in which it stands.
        pages: in the order of the path; of a lazy group, the first page alone.
        run: the pages of a lazy group, of which the first `left` are still in the tier; None once
            all of them are in `pages`.
    """

    order: OrderedDict[PageGroup, None]
    pages: dict[StoredPage, None]
    run: StoredRun | None = None
    left: int = 0

    def all(self) -> list[StoredPage]:
        """Its pages; this makes those of a lazy group."""
        return [*self.pages] if self.run is None else self.run.pages()[: self.left]

    @property
    def is_of_window(self) -> bool:
        """Whether its pages are of one window, and useless without each other."""
        return next(iter(self.pages)).is_of_window

    @property
    def is_read(self) -> bool:
        """Whether loads are reading all of its pages."""
        return self.run is None and all(page.readers for page in self.pages)

    def trim(self, count: int, page_size: int) -> tuple[list[int], int]:
        """Cut up to `count` pages off the end of a lazy group, which keeps its first page; returns
        the slots, the last one first, and the number of tokens."""
        assert self.run is not None
        keep = max(1, self.left - count)
        slots = self.run.slots[keep : self.left]
        num_tokens = len(self.run.tokens[keep * page_size : self.left * page_size])
        self.left = keep
        return slots[::-1], num_tokens


class LoadCost(NamedTuple):
    """Seconds to load pages, and to compute their tokens instead, as measured while running; None
    before the first measurement."""

    load: float | None = None
    compute: float | None = None

    @property
    def pays(self) -> bool:
        """Whether loading is cheaper, or a cost is unknown."""
        return self.load is None or self.compute is None or self.load < self.compute


UNMEASURED = LoadCost()


class PageStore(Protocol):
    """Copies the bytes of pages for a tier."""

    def save(self, pages: Pages, stored: StoredPages) -> None:
        """Copy the bytes of `pages`, of the pool or the tier above, into the slots of `stored`, and
        set their `state` when that is done, at once or from a thread. `pages` may be overwritten
        when the call returns. Saves to one slot take effect in order. Raises nothing.
        """

    def clear(self) -> None:
        """Empty all slots."""


class TierListener(Protocol):
    """Is told which pages come into a tier, and which leave it other than by `clear`."""

    def added(self, page: StoredPage, tokens: Tokens) -> None:
        """`page` ends the prefix `tokens`; its bytes may still be on their way."""

    def dropped(self, page: StoredPage) -> None: ...
