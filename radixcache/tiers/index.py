"""A tier below the pool: which slot of a slower store holds which evicted page.

A page that leaves the radix tree is copied into a slot of the tier, where a prompt that goes on
from what the tree holds finds it. The key of a page is a digest of all tokens up to its end, so the
tree needs no change. A page may be in both: after a load, the copy in the tier stays, but is
evicted first, since the pool has the page too. So both together hold what one LRU cache of both
sizes would, and a page that leaves the pool again is not written again (unless it was computed
again although the tier had it).

As in the pool, slots are numbers: a `PageStore` copies the bytes. Only the namespace `None` comes
here: salted tokens are secret, and a store may outlive the process. A tier may have another one
below it, as host memory has a disk: pages that leave the upper one go to the lower.

Pages that leave the pool together are one lazy group until one of them is looked for: in a cache
that never hits, the cost of the index grows with the requests, and hardly with their pages.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.pages import Pages, as_count
from radixcache.tiers.stored_pages import (
    Medium,
    PageGroup,
    PageStore,
    StoredPage,
    StoredPages,
    StoredRun,
    TierListener,
)
from radixcache.tokens import Tokens, common_length

S = TypeVar("S", bound=PageStore)

_SIBLINGS = 64
"""The newest pages behind a prefix that are compared with what follows, if none matches whole."""


class LowerTier(Generic[S]):
    """The slots of a store, and the pages in them.

    Args:
        num_slots: pages that the store has room for.
        page_size: tokens per page.
        store: copies the bytes.
        medium: the kind of the store.
        below: the tier to which pages go that leave this one.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        store: S,
        medium: Medium = "disk",
        below: LowerTier[S] | None = None,
    ) -> None:
        self.num_slots = as_count(num_slots, "the number of slots")
        if self.num_slots < 1:
            raise InvalidRequest("a tier has at least one slot")
        self.page_size = page_size
        self.store, self.medium, self.below = store, medium, below
        self.listener: TierListener | None = None
        self.num_evicted = 0
        self._forget()

    def _forget(self) -> None:
        self._free = [*range(self.num_slots)][::-1]
        self._num_tokens = 0
        self._pages: dict[bytes, StoredPage] = {}
        """Stored pages by key; a lazy group stands under its first page alone."""
        self._children: dict[tuple[bytes, int], list[StoredPage]] = {}
        """Stored pages by parent and first token, the newest last."""
        self._only: OrderedDict[PageGroup, None] = OrderedDict()
        """Pages that the pool does not hold, as far as is known, least recently used first."""
        self._copies: OrderedDict[PageGroup, None] = OrderedDict()
        """Pages that were loaded since they left the pool, least recently used first."""

    def __len__(self) -> int:
        return self.num_slots - len(self._free)

    def chain(self) -> Iterator[LowerTier[S]]:
        """This tier and those below it, in order."""
        tier: LowerTier[S] | None = self
        while tier is not None:
            yield tier
            tier = tier.below

    @property
    def num_tokens(self) -> int:
        """Tokens of all pages but those of windows, for any thread. O(1)."""
        return self._num_tokens

    def find(self, tokens: Tokens, start: int) -> tuple[list[StoredPage], int]:
        """The pages by which the tier extends the prefix of `start` tokens, and the length that it
        then has. The first page begins at or before `start`; the last one may end in other tokens.
        The later pages of a lazy group are found once its first one was. Changes nothing that is
        stored. O(start + pages).
        """
        found: list[StoredPage] = []
        size, end = self.page_size, start
        at = start // size * size
        if not self._pages:
            return found, start
        digest = blake2b(tokens[:at].tobytes(), digest_size=16)
        while at < len(tokens):
            piece = tokens[at : at + size]
            page, length = self._child(digest, piece)
            if page is None or page.state != "stored" or at + length <= end:
                break
            found.append(page)
            at, end = at + size, at + length
            if length < size:
                break
        return found, end

    def search(self, tokens: Tokens, start: int) -> tuple[LowerTier[S], list[StoredPage], int]:
        """`find` in the first tier, from this one down, that extends the prefix."""
        above, tier = list[LowerTier[S]](), self
        while not (found := tier.find(tokens, start))[0] and tier.below is not None:
            above.append(tier)
            tier = tier.below
        pages, end = found
        for page in pages:
            for other in above:  # a lazy group there may begin with this page
                other._page(page.key)
        return tier, pages, end

    def _child(self, digest: blake2b, piece: Tokens) -> tuple[StoredPage | None, int]:
        """The page after the prefix of `digest` that shares most leading tokens with `piece`, and
        how many. Adds `piece` to `digest` if any page begins with its first token."""
        siblings = self._children.get((digest.digest(), piece.item(0)))
        if siblings is None:
            return None, 0
        digest.update(piece.tobytes())
        best, length = self._page(digest.digest()), len(piece)
        if best is None or best.state == "lost":
            best, length = None, 0
            for page in reversed(siblings[-_SIBLINGS:]):
                count = min(len(page.tokens), len(piece))
                same = common_length(page.tokens[:count], piece[:count])
                if same > length and page.state != "lost":
                    best, length = page, same
                    if same == len(piece):
                        break
        return best, length

    def _page(self, key: bytes) -> StoredPage | None:
        """The page of that key; a lazy group that begins with it becomes an ordinary one."""
        page = self._pages.get(key)
        if page is not None and (group := page.group) is not None and group.run is not None:
            self._materialise(group)
        return page

    def _materialise(self, group: PageGroup) -> None:
        """Make the pages of a lazy group, and enter them into the index."""
        pages, group.run = group.all()[1:], None
        for page in pages:
            twin = self._pages.get(page.key)
            is_lazy = twin is not None and twin.group is not None and twin.group.run is not None
            if twin is not None and (is_lazy or twin.readers or page.state == "lost"):
                self._free.append(page.slot)
                self._num_tokens -= _count(page.tokens)
                continue
            if twin is not None:
                self._drop(twin)
            self._enter(page)
            page.group = group
            group.pages[page] = None

    def begins(self, path: Tokens) -> bool:
        """Whether the first page of a path is here; pages that are still being written count."""
        first = path[: self.page_size].tobytes()
        return blake2b(first, digest_size=16).digest() in self._pages

    def holds(self, page: StoredPage) -> bool:
        """Whether the page is still here: a page that is read stays, unless the tier is cleared."""
        return self._pages.get(page.key) is page

    def begin_load(self, pages: Iterable[StoredPage]) -> None:
        """The pages are being read: their slots stay until `end_load`."""
        for page in pages:
            self._page(page.key)
            page.readers += 1

    def end_load(self, pages: Iterable[StoredPage], loaded: int = 0) -> None:
        """The reading has ended; the pool now holds the first `loaded` of their tokens, too."""
        whole, part = list[StoredPage](), list[StoredPage]()
        for page in pages:
            page.readers -= 1
            if self.holds(page):
                if page.state == "lost" and not page.readers:
                    self._drop(page)
                elif page.state != "lost" and loaded > 0:
                    (whole if len(page.tokens) <= loaded else part).append(page)
            loaded -= self.page_size
        self._use(part, self._only)
        self._use(whole, self._copies)

    def recover(self, loads: Iterable[Iterable[StoredPage]]) -> None:
        """After a call was cut off: rebuild the index, with the pages of `loads` under way.
        O(pages)."""
        pages = self.in_order()
        for page in pages:
            page.readers = 0
        self._forget()
        self.restore(pages)
        for read in loads:
            self.begin_load(page for page in read if self.holds(page))

    def demote(self, tokens: Tokens, first: int, pages: Pages) -> None:
        """Take pages that leave the pool: `pages`, from index `first` of the page table of the
        prefix `tokens` to its end. O(tokens), of which O(1) for each page that is never found."""
        size = self.page_size
        at, used = first * size, list[StoredPage]()
        digest = blake2b(tokens[:at].tobytes(), digest_size=16)
        shorter: StoredPage | None = None
        while at < len(tokens):
            piece, before = tokens[at : at + size], digest.copy()
            there, length = self._child(digest, piece)
            if there is None or length < len(piece):
                if there is not None and length == len(there.tokens):
                    shorter = there
                digest = before
                break
            used.append(there)
            at += size
        group = self._use(used, self._only)
        while at < len(tokens):
            count = self._add(tokens, at, digest, pages[at // size - first :], group)
            if count and shorter is not None and self.holds(shorter) and not shorter.readers:
                self._drop(shorter)  # a longer page begins with it now
            if not count or self.below is None:
                break
            digest = digest.copy()  # the run goes on from the one before
            digest.update(tokens[at : at + count * size].tobytes())
            at += count * size

    def take(self, pages: Sequence[StoredPage]) -> None:
        """Take pages of one path, in its order, that leave the tier above: their slots there still
        have their bytes."""
        used = list[StoredPage]()
        for page in pages:
            there = self._page(page.key)
            if there is not None and there.state == "lost" and not there.readers:
                self._drop(there)
            elif there is not None:
                used.append(there)
        group = self._use(used, self._only)
        new = [page for page in pages if page.key not in self._pages]
        new = new[: self._make_room(len(new), group)]
        if not new:
            return
        copies = [StoredPage(self._free.pop(), page.parent, page.key, page.tokens) for page in new]
        self.store.save(np.array([page.slot for page in new], np.int32), StoredPages(copies))
        for page in copies:
            self._enter(page)
            self._num_tokens += _count(page.tokens)
        here = (self._pages.get(page.key) for page in pages)
        self._use([page for page in here if page is not None], self._only)

    def evict_all(self) -> None:
        """Evict all pages that are not being read into the tier below."""
        self._make_room(self.num_slots, None)

    def restore(self, pages: Iterable[StoredPage]) -> None:
        """Enter pages that the store has from before, least recently used first."""
        free, groups = {*range(self.num_slots)}, list[list[StoredPage]]()
        for page in pages:
            if page.key in self._pages or page.slot not in free:
                continue  # left by a call that was cut off
            free.remove(page.slot)
            self._enter(page)
            self._num_tokens += _count(page.tokens)
            page.group = None
            if groups and groups[-1][-1].parent == page.key:
                groups[-1].append(page)
            else:
                groups.append([page])
        for group in groups:
            self._use(group[::-1], self._only)
        self._free = sorted(free, reverse=True)

    def from_root(self) -> Iterator[tuple[StoredPage, Tokens]]:
        """All pages whose prefix is in the tier without a gap, parents first, each with its prefix:
        views of one array for each path. O(tokens of all paths)."""
        for page in [*self._pages.values()]:
            self._page(page.key)
        pages = defaultdict[bytes, list[StoredPage]](list)
        for page in self.in_order():
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
        """All pages, the next to be evicted first. O(pages)."""
        return [p for group in [*self._copies, *self._only] for p in reversed(group.all())]

    def clear(self) -> None:
        """Forget all pages, also in tiers below; loads under way come to nothing."""
        self._forget()
        self.store.clear()
        if self.below is not None:
            self.below.clear()

    def _add(
        self, tokens: Tokens, at: int, before: blake2b, pages: Pages, last: PageGroup | None
    ) -> int:
        """Save the pages of the prefix `tokens` from position `at` on as a lazy group that is older
        than `last`; returns for how many there was room."""
        digest = before.copy()
        digest.update(tokens[at : at + self.page_size].tobytes())
        if not (count := self._make_room(len(pages), last)):
            return 0
        if (same := self._page(digest.digest())) is not None:  # lost, or made while making room
            if same.readers:
                return 0
            self._drop(same)
        slots = self._free[: -count - 1 : -1]
        del self._free[-count:]
        held = tokens[at : at + count * self.page_size].copy()
        run = StoredRun(slots, held, before, self.page_size)
        self.store.save(pages[:count], run)  # first: else, if cut off, a page would never be stored
        group = run.first.group = PageGroup(self._only, {run.first: None}, run, count)
        self._enter(run.first)
        self._only[group] = None
        self._num_tokens += _count(held)
        if last is not None and last.pages:
            self._only.move_to_end(last)
        if self.listener is not None and not run.first.is_of_window:
            self._materialise(group)
            for end, page in enumerate(run.pages(), at // self.page_size + 1):
                if page.group is group:
                    self.listener.added(page, tokens[: end * self.page_size])
        return count

    def _make_room(self, count: int, last: PageGroup | None) -> int:
        """Evict until `count` slots are free, least recently used first, the end of a path before
        its beginning; spare `last`, unless its pages go to a tier below. Returns how many of
        `count` are free."""
        if self.below is not None:
            last = None
        while (missing := count - len(self._free)) > 0:
            groups = (group for group in chain(self._copies, self._only) if group is not last)
            if (victim := next((group for group in groups if not group.is_read), None)) is None:
                self.num_evicted += missing
                return len(self._free)
            self.num_evicted += self._evict(victim, missing)
        return count

    def _evict(self, group: PageGroup, count: int) -> int:
        """Evict up to `count` pages from the end of a group, or a whole window; returns how
        many."""
        gone = 0
        count = self.num_slots if group.is_of_window else count
        if self.below is not None:
            return self._push_down(group, self.below, count)
        if group.run is not None:
            slots, num_tokens = group.trim(count, self.page_size)
            self._free += slots
            self._num_tokens -= 0 if group.is_of_window else num_tokens
            gone = len(slots)
            if group.left > 1:
                return gone
            group.run = None
        while gone < count and group.pages:
            page, _ = group.pages.popitem()  # `reversed` would pass all evicted entries each time
            group.pages[page] = None
            if page.readers:
                unread = [page for page in group.pages if not page.readers]
                return gone + sum(map(self._drop, unread[gone - count :]))
            gone += self._drop(page)
        return gone

    def _push_down(self, group: PageGroup, below: LowerTier[S], count: int) -> int:
        """`_evict`, where `below` takes the pages that the pool does not hold."""
        if group.run is not None:
            self._materialise(group)
        pages = [page for page in group.pages if not page.readers][-count:]
        if group.order is self._only:
            below.take([page for page in pages if page.state == "stored"])
        return sum(map(self._drop, pages))

    def _use(
        self, pages: list[StoredPage], order: OrderedDict[PageGroup, None]
    ) -> PageGroup | None:
        """Make one group of pages of one path, which are used now: the youngest of `order`."""
        if not pages:
            return None
        group = PageGroup(order, {})
        order[group] = None
        for page in pages:  # if this is cut off, a page is in two groups, never in none
            self._page(page.key)
            before, page.group = page.group, group
            group.pages[page] = None
            self._leave(before, page)
        return group

    def _enter(self, page: StoredPage) -> None:
        self._pages[page.key] = page
        self._children.setdefault((page.parent, page.tokens.item(0)), []).append(page)

    def _drop(self, page: StoredPage) -> bool:
        del self._pages[page.key]
        self._leave(page.group, page)
        place = page.parent, page.tokens.item(0)
        siblings = self._children[place]
        if len(siblings) == 1:
            del self._children[place]
        else:
            siblings.remove(page)
        self._free.append(page.slot)
        self._num_tokens -= _count(page.tokens)
        if self.listener is not None and not page.is_of_window:
            self.listener.dropped(page)
        return True

    @staticmethod
    def _leave(group: PageGroup | None, page: StoredPage) -> None:
        if group is not None:
            del group.pages[page]
            if not group.pages:
                del group.order[group]

    def check(self) -> None:
        """Assert the invariants: every slot is free or holds one page, found under its tokens."""
        pages = self.in_order()
        assert sorted([page.slot for page in pages] + self._free) == [*range(self.num_slots)]
        assert self._num_tokens == sum(_count(page.tokens) for page in pages)
        found = list[StoredPage]()
        for order in (self._copies, self._only):
            for group in order:
                assert group.order is order and group.pages, "a group strayed, or is empty"
                assert group.run is None or [*group.pages] == [group.run.first]
                found += group.pages
                assert all(page.group is group for page in group.pages)
        for page in found:
            assert self._pages[page.key] is page
            assert page in self._children[page.parent, page.tokens.item(0)]
            assert page.readers >= 0 and 0 < len(page.tokens) <= self.page_size
        assert len(found) == len(self._pages) == sum(map(len, self._children.values()))
        if self.below is not None:
            self.below.check()


def _count(tokens: Tokens) -> int:
    """How many tokens of a text these are: all, or none of a window's name."""
    return len(tokens) if tokens.item(0) >= 0 else 0
