"""What a tier below the pool and its store tell each other: which pages are in which slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

from radixcache.nodes import Tokens
from radixcache.pages import Pages

Medium = Literal["host", "disk"]
State = Literal["writing", "stored", "lost"]


@dataclass(eq=False, slots=True)
class StoredPage:
    """A page of the tier.

    Attributes:
        slot: where its bytes are.
        parent: digest of all tokens before the page.
        key: digest of all tokens up to its end.
        tokens: [1 to page_size] int32, those that it holds.
        state: "writing" until the store has its bytes, "lost" if it never will.
        readers: loads under way; the slot stays as long.
        group: with which pages it was last used; the tier's own.
    """

    slot: int
    parent: bytes
    key: bytes
    tokens: Tokens
    state: State = "writing"
    readers: int = 0
    group: Any = None


class StoredPages:
    """Pages that are saved together; for any thread."""

    def __init__(self, pages: list[StoredPage]) -> None:
        self._pages = pages

    def pages(self) -> list[StoredPage]:
        """All of them; the same list for everybody."""
        return self._pages

    def finish(self, state: State) -> None:
        """The state of all of them; for the thread that saves them."""
        for page in self._pages:
            page.state = state


class StoredRun(StoredPages):
    """Pages that left the pool together, in the order of their path.

    All but the first are made when somebody asks for one: most are evicted before that.

    Args:
        slots: one for each.
        tokens: of all of them.
        before: the digest of all tokens before.
    """

    def __init__(self, slots: list[int], tokens: Tokens, before: blake2b, page_size: int) -> None:
        self.slots, self.tokens = slots, tokens
        self._before, self._page_size = before, page_size
        self._state: State = "writing"
        self.first = next(self._make())
        self._made: dict[None, list[StoredPage]] = {}
        """One list, however many threads make one at a time, and no lock that a fork could copy."""

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


class LoadCost(NamedTuple):
    """Seconds to load pages, and to compute their tokens, as measured while running; None before
    anything was."""

    load: float | None = None
    compute: float | None = None

    @property
    def pays(self) -> bool:
        """Whether to load them."""
        return self.load is None or self.compute is None or self.load < self.compute


UNMEASURED = LoadCost()


class PageStore(Protocol):
    """What copies bytes for a tier."""

    def save(self, pages: Pages, stored: StoredPages) -> None:
        """Copy the bytes of `pages`, of the pool or of the tier above if there is one, which may be
        overwritten when the call returns, into the slots of `stored`. Sets their `state` when it is
        done, at once or from a thread. Saves of a slot take effect in their order. Raises nothing.
        """

    def clear(self) -> None:
        """Nothing is in any slot."""


class TierListener(Protocol):
    """Hears what comes into a tier, and leaves it other than by `clear`."""

    def added(self, page: StoredPage, tokens: Tokens) -> None:
        """`page`, at the end of the prefix `tokens`; its bytes may be on their way."""

    def dropped(self, page: StoredPage) -> None: ...
