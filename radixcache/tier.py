"""A second tier below the pool: which slot of a slower store holds which evicted page.

A page that leaves the radix tree is copied into a slot of the tier, and a prompt that goes on from
what the tree holds finds it there. Pages are known by what they hold: a digest of all tokens up to
their end. So nothing in the tree changes, and a page may be in both tiers: after a load, its copy
stays, and is the first to be evicted, for the pool has it too. Then the two tiers together hold
what one LRU cache of both sizes would, and a page that leaves the pool again is not written twice.

As in the pool, slots are numbers: a `PageStore` copies the bytes. Other than `None`, namespaces
stay out: what is salted is somebody's secret, and a store may outlive the process.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

import numpy as np

from radixcache.base import Tokens
from radixcache.errors import InvalidRequest
from radixcache.nodes import common_length
from radixcache.pages import Pages, as_count

Medium = Literal["host", "disk"]

_SIBLINGS = 64
"""Pages, the newest, that are compared with what follows a prefix, if none is the same in full."""


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
    """

    slot: int
    parent: bytes
    key: bytes
    tokens: Tokens
    state: Literal["writing", "stored", "lost"] = "writing"
    readers: int = 0


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

    def save(self, pages: Sequence[int], stored: Sequence[StoredPage]) -> None:
        """Copy the bytes of `pages`, which may be overwritten when the call returns, into the slots
        of `stored`. Sets their `state` when it is done, at once or from a thread. Saves of a slot
        take effect in their order. Raises nothing."""

    def clear(self) -> None:
        """Nothing is in any slot."""


class TierListener(Protocol):
    """Hears what comes into a tier, and leaves it other than by `clear`."""

    def added(self, page: StoredPage, tokens: Tokens) -> None:
        """`page`, at the end of the prefix `tokens`; its bytes may be on their way."""

    def dropped(self, page: StoredPage) -> None: ...


class LowerTier:
    """The slots of a store, and what is in them.

    Args:
        num_slots: pages that the store holds.
        page_size: tokens of a page.
        store: copies the bytes.
        medium: what it is.
    """

    def __init__(
        self, num_slots: int, page_size: int, store: PageStore, medium: Medium = "disk"
    ) -> None:
        self.num_slots = as_count(num_slots, "the number of slots")
        if self.num_slots < 1:
            raise InvalidRequest("a tier has at least one slot")
        self.page_size = page_size
        self.store, self.medium = store, medium
        self.listener: TierListener | None = None
        self.num_evicted = 0
        self._forget()

    def _forget(self) -> None:
        self._free = [*range(self.num_slots)][::-1]
        self._pages: dict[bytes, StoredPage] = {}
        """By key."""
        self._only: OrderedDict[bytes, StoredPage] = OrderedDict()
        """Those that the pool does not hold, as far as is known; the least recently used first."""
        self._copies: OrderedDict[bytes, StoredPage] = OrderedDict()
        """Those that were loaded since they left the pool."""
        self._children: dict[tuple[bytes, int], list[StoredPage]] = {}
        """By parent and first token; the newest last."""

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_tokens(self) -> int:
        """Tokens of all pages, for any thread. O(pages)."""
        return sum(len(page.tokens) for page in [*self._pages.values()])

    def find(self, tokens: Tokens, start: int) -> tuple[list[StoredPage], int]:
        """The pages by which the tier goes on from the prefix of `start` tokens, and its length
        then. The first page begins at or before `start`, and of the last one some tokens may be
        others. Changes nothing. O(start + pages).
        """
        found: list[StoredPage] = []
        if not self._pages:
            return found, start
        size, end = self.page_size, start
        at = start // size * size
        if (digest := self._digest_if_known(tokens, at)) is None:
            return found, start
        while at < len(tokens):
            piece, parent = tokens[at : at + size], digest.digest()
            digest.update(piece.tobytes())
            page, length = self._child(parent, digest.digest(), piece)
            if page is None or page.state != "stored" or at + length <= end:
                break
            found.append(page)
            at, end = at + size, at + length
            if length < size:
                break
        return found, end

    def _digest_if_known(self, tokens: Tokens, at: int) -> blake2b | None:
        digest = blake2b(tokens[:at].tobytes(), digest_size=16)
        follows = at < len(tokens) and (digest.digest(), tokens.item(at)) in self._children
        return digest if follows else None

    def _child(self, parent: bytes, key: bytes, piece: Tokens) -> tuple[StoredPage | None, int]:
        """The page after `parent` that begins with most of `piece`, and with how many tokens; `key`
        is that of a page with exactly these."""
        best, length = self._pages.get(key), len(piece)
        if best is not None and best.state != "lost":
            return best, length
        best, length = None, 0
        siblings = self._children.get((parent, piece.item(0)))
        if siblings is None:
            return best, length
        for page in reversed(siblings[-_SIBLINGS:]):
            count = min(len(page.tokens), len(piece))
            same = common_length(page.tokens[:count], piece[:count])
            if same > length and page.state != "lost":
                best, length = page, same
                if same == len(piece):
                    break
        return best, length

    def holds(self, page: StoredPage) -> bool:
        """Whether it is still there: what is read stays, but for a `clear`."""
        return self._pages.get(page.key) is page

    def begin_load(self, pages: Iterable[StoredPage]) -> None:
        """These are being read: their slots stay until `end_load`."""
        for page in pages:
            page.readers += 1

    def end_load(self, pages: Iterable[StoredPage], *, loaded: bool) -> None:
        """The reading has ended; if they were `loaded`, the pool holds these pages as well."""
        for page in reversed([*pages]):  # so that what follows goes before what it follows
            page.readers -= 1
            if not self.holds(page):
                continue
            if page.state == "lost":
                self._drop(page)
            elif loaded:
                self._order_of(page).pop(page.key)
                self._copies[page.key] = page

    def recover(self, loads: Iterable[Iterable[StoredPage]]) -> None:
        """A call was cut off: these are the loads under way. O(pages)."""
        for page in self._pages.values():
            page.readers = 0
        for pages in loads:
            self.begin_load(pages)

    def demote(self, tokens: Tokens, first: int, pages: Pages) -> None:
        """Pages leave the pool: `pages` from index `first` of the page table of the prefix
        `tokens`. O(tokens)."""
        size = self.page_size
        digest = blake2b(tokens[: first * size].tobytes(), digest_size=16)
        gone: list[tuple[int, StoredPage]] = []
        key = digest.digest()
        for index, number in enumerate(pages.tolist(), first):
            piece = tokens[index * size : (index + 1) * size].copy()
            digest.update(piece)
            parent, key = key, digest.digest()
            gone.append((number, StoredPage(-1, parent, key, piece)))
        new = []
        ends = range((first + len(gone)) * size, first * size, -size)
        for end, (number, page) in zip(ends, reversed(gone), strict=True):
            # Reversed, so that what follows goes before what it follows.
            there, length = self._child(page.parent, page.key, page.tokens)
            if there is not None and length == len(page.tokens):
                self._order_of(there).pop(there.key)
                self._only[there.key] = there
            elif self._add(page):
                new.append((number, page))
                if self.listener is not None:
                    self.listener.added(page, tokens[:end])
                if there is not None and length == len(there.tokens):
                    self._supersede(there)
        new = [(number, page) for number, page in new if self.holds(page)]
        if new:
            numbers, stored = zip(*new, strict=True)
            self.store.save(numbers, stored)

    def restore(self, pages: Iterable[StoredPage]) -> None:
        """Take in what the store holds from before, least recently used first."""
        taken = set()
        for page in pages:
            self._insert(page)
            taken.add(page.slot)
        self._free = [slot for slot in range(self.num_slots) if slot not in taken][::-1]

    def from_root(self) -> Iterator[tuple[StoredPage, Tokens]]:
        """Pages that follow the empty prefix without a gap, parents first, and their prefixes:
        views of one array a path. O(tokens of all paths)."""
        pages = defaultdict[bytes, list[StoredPage]](list)
        for page in self._pages.values():
            pages[page.parent].append(page)
        paths = [[page] for page in pages[blake2b(digest_size=16).digest()]]
        while paths:
            path = paths.pop()
            first = len(path) - 1  # those before it are known
            while following := pages[path[-1].key]:
                paths += [[*path, page] for page in following[1:]]
                path.append(following[0])
            tokens = np.concatenate([page.tokens for page in path])
            for at, page in enumerate(path[first:], first + 1):
                yield page, tokens[: at * self.page_size]

    def in_order(self) -> list[StoredPage]:
        """All pages, the next to be evicted first."""
        return [*self._copies.values(), *self._only.values()]

    def clear(self) -> None:
        """Forget all pages; those that are being read are read in vain."""
        self._forget()
        self.store.clear()

    def _add(self, page: StoredPage) -> bool:
        """Give `page` a slot, if there is one that nobody reads."""
        if (lost := self._pages.get(page.key)) is not None:
            if lost.readers:
                return False
            self._drop(lost)
        if not self._free:
            victim = self._first_unread(self._copies) or self._first_unread(self._only)
            if victim is None:
                return False
            self._drop(victim)
            self.num_evicted += 1
        page.slot = self._free.pop()
        self._insert(page)
        return True

    @staticmethod
    def _first_unread(order: OrderedDict[bytes, StoredPage]) -> StoredPage | None:
        for page in order.values():
            if not page.readers:
                return page
        return None

    def _supersede(self, page: StoredPage) -> None:
        """All of it is in a longer one now."""
        if self.holds(page) and not page.readers:
            self._drop(page)

    def _insert(self, page: StoredPage) -> None:
        self._pages[page.key] = self._only[page.key] = page
        self._children.setdefault((page.parent, page.tokens.item(0)), []).append(page)

    def _drop(self, page: StoredPage) -> None:
        del self._pages[page.key]
        del self._order_of(page)[page.key]
        place = page.parent, page.tokens.item(0)
        siblings = self._children[place]
        if len(siblings) == 1:
            del self._children[place]
        else:
            siblings.remove(page)
        self._free.append(page.slot)
        if self.listener is not None:
            self.listener.dropped(page)

    def _order_of(self, page: StoredPage) -> OrderedDict[bytes, StoredPage]:
        return self._only if page.key in self._only else self._copies

    def check(self) -> None:
        """Assert the invariants: every slot is free or holds one page, found under its tokens."""
        slots = [page.slot for page in self._pages.values()]
        assert sorted(slots + self._free) == [*range(self.num_slots)], "a slot is lost, or in use"
        assert self._pages.keys() == self._only.keys() | self._copies.keys()
        assert not self._only.keys() & self._copies.keys(), "a page in two orders"
        children = [page for pages in self._children.values() for page in pages]
        assert {*map(id, children)} == {*map(id, self._pages.values())}
        for key, page in self._pages.items():
            assert page.key == key and 0 < len(page.tokens) <= self.page_size
            assert page.readers >= 0
            assert page in self._children[page.parent, page.tokens.item(0)]
            assert np.dtype(np.int32) == page.tokens.dtype
