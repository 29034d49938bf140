"""A second tier below the pool: which slot of a slower store holds which evicted page.

A page that leaves the radix tree is copied into a slot of the tier, and a prompt that goes on from
what the tree holds finds it there. Pages are known by what they hold: a digest of all tokens up to
their end. So nothing in the tree changes, and a page may be in both tiers: after a load, its copy
stays, and is the first to be evicted, for the pool has it too. Then the two tiers together hold
what one LRU cache of both sizes would, and a page that leaves the pool again is not written twice
(but for pages that are computed again though the tier has them).

As in the pool, slots are numbers: a `PageStore` copies the bytes. Other than `None`, namespaces
stay out: what is salted is somebody's secret, and a store may outlive the process. A tier may have
another one below it, as host memory has a disk: what leaves the one goes to the other.

Pages that leave the pool together are one entry, until somebody looks for one of them: in a cache
that never hits, what this costs grows with the requests, and hardly with their pages.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.nodes import Tokens, common_length
from radixcache.pages import Pages, as_count
from radixcache.stored import Medium, PageStore, StoredPage, StoredPages, StoredRun, TierListener

S = TypeVar("S", bound=PageStore)

_SIBLINGS = 64
"""Pages, the newest, that are compared with what follows a prefix, if none is the same in full."""


@dataclass(eq=False, slots=True)
class _Group:
    """Pages of one path that were last used together; the last of them is evicted first.

    Attributes:
        order: where it stands.
        pages: in the order of the path; of a run that nobody has looked at only the first one.
        run: the same run; of its pages `left` are still here, from the first one on.
    """

    order: OrderedDict[_Group, None]
    pages: dict[StoredPage, None]
    run: StoredRun | None = None
    left: int = 0

    def all(self) -> list[StoredPage]:
        return [*self.pages] if self.run is None else self.run.pages()[: self.left]


def _unseen(page: StoredPage) -> _Group | None:
    """The group of a page, if that is the first one of a run that nobody has looked at."""
    group: _Group | None = page.group
    return group if group is not None and group.run is not None else None


class LowerTier(Generic[S]):
    """The slots of a store, and what is in them.

    Args:
        num_slots: pages that the store holds.
        page_size: tokens of a page.
        store: copies the bytes.
        medium: what it is.
        below: the tier to which pages go from this one.
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
        """By key; of a run that nobody has looked at only the first one."""
        self._children: dict[tuple[bytes, int], list[StoredPage]] = {}
        """The same by parent and first token; the newest last."""
        self._only: OrderedDict[_Group, None] = OrderedDict()
        """Those that the pool does not hold, as far as is known; the least recently used first."""
        self._copies: OrderedDict[_Group, None] = OrderedDict()
        """Those that were loaded since they left the pool."""

    def __len__(self) -> int:
        return self.num_slots - len(self._free)

    def chain(self) -> Iterator[LowerTier[S]]:
        """This tier, and those below it."""
        tier: LowerTier[S] | None = self
        while tier is not None:
            yield tier
            tier = tier.below

    @property
    def num_tokens(self) -> int:
        """Tokens of all pages, for any thread. O(1)."""
        return self._num_tokens

    def find(self, tokens: Tokens, start: int) -> tuple[list[StoredPage], int]:
        """The pages by which the tier goes on from the prefix of `start` tokens, and its length
        then. The first page begins at or before `start`, and of the last one some tokens may be
        others. Of pages that left the pool together the first one must have been looked for before
        others are found. Changes nothing that is stored. O(start + pages).
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
        """As `find`, in the first tier from this one on down that goes on from the prefix."""
        above, tier = list[LowerTier[S]](), self
        while not (found := tier.find(tokens, start))[0] and tier.below is not None:
            above.append(tier)
            tier = tier.below
        pages, end = found
        for page in pages:
            for other in above:  # pages that left the pool together may begin with this one there
                other._page(page.key)
        return tier, pages, end

    def _child(self, digest: blake2b, piece: Tokens) -> tuple[StoredPage | None, int]:
        """The page after the prefix of `digest` that begins with most of `piece`, and with how many
        tokens. `digest` goes on by `piece`, if any page begins with its first token."""
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
        """The page of that key; if a run begins with it, all of that can be found from now on."""
        page = self._pages.get(key)
        if page is not None and (group := _unseen(page)) is not None:
            self._look_at(group)
        return page

    def _look_at(self, group: _Group) -> None:
        """Each of its pages can be found from now on."""
        pages, group.run = group.all()[1:], None
        for page in pages:
            twin = self._pages.get(page.key)  # for which nobody has looked
            if twin is not None and (_unseen(twin) or twin.readers or page.state == "lost"):
                self._free.append(page.slot)
                self._num_tokens -= len(page.tokens)
                continue
            if twin is not None:
                self._drop(twin)
            self._enter(page)
            page.group = group
            group.pages[page] = None

    def holds(self, page: StoredPage) -> bool:
        """Whether it is still there: what is read stays, but for a `clear`."""
        return self._pages.get(page.key) is page

    def begin_load(self, pages: Iterable[StoredPage]) -> None:
        """These are being read: their slots stay until `end_load`."""
        for page in pages:
            self._page(page.key)
            page.readers += 1

    def end_load(self, pages: Iterable[StoredPage], loaded: int = 0) -> None:
        """The reading has ended; of their tokens the pool holds the first `loaded` as well."""
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
        """A call was cut off: these are the loads under way. O(pages)."""
        pages = self.in_order()
        for page in pages:
            page.readers = 0
        self._forget()
        self.restore(pages)
        for read in loads:
            self.begin_load(page for page in read if self.holds(page))

    def demote(self, tokens: Tokens, first: int, pages: Pages) -> None:
        """Pages leave the pool: `pages` from index `first` of the page table of the prefix
        `tokens`, to its end. O(tokens), and O(1) for a page that nobody looks at."""
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
                self._drop(shorter)  # all of it is in a longer one now
            if not count or self.below is None:
                break
            digest = digest.copy()  # the run goes on from the one before
            digest.update(tokens[at : at + count * size].tobytes())
            at += count * size

    def take(self, pages: Sequence[StoredPage]) -> None:
        """Pages of one path, in its order, leave the tier above, in whose slots they still are."""
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
            self._num_tokens += len(page.tokens)
        here = (self._pages.get(page.key) for page in pages)
        self._use([page for page in here if page is not None], self._only)

    def evict_all(self) -> None:
        """All that nobody reads leaves the tier, for the one below."""
        self._make_room(self.num_slots, None)

    def restore(self, pages: Iterable[StoredPage]) -> None:
        """Take in what the store holds from before, least recently used first."""
        free, groups = {*range(self.num_slots)}, list[list[StoredPage]]()
        for page in pages:
            if page.key in self._pages or page.slot not in free:
                continue  # a call was cut off
            free.remove(page.slot)
            self._enter(page)
            self._num_tokens += len(page.tokens)
            page.group = None
            if groups and groups[-1][-1].parent == page.key:
                groups[-1].append(page)
            else:
                groups.append([page])
        for group in groups:
            self._use(group[::-1], self._only)
        self._free = sorted(free, reverse=True)

    def from_root(self) -> Iterator[tuple[StoredPage, Tokens]]:
        """Pages that follow the empty prefix without a gap, parents first, and their prefixes:
        views of one array a path. O(tokens of all paths)."""
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

    def newest(self) -> Iterator[StoredPage]:
        """All pages, those first that were used last."""
        for order in (self._only, self._copies):
            for group in reversed(order):
                yield from group.all()

    def clear(self) -> None:
        """Forget all pages, also below; those that are being read are read in vain."""
        self._forget()
        self.store.clear()
        if self.below is not None:
            self.below.clear()

    def _add(
        self, tokens: Tokens, at: int, before: blake2b, pages: Pages, last: _Group | None
    ) -> int:
        """Save what of the prefix `tokens` begins at `at`, in slots that nobody reads; returns for
        how many pages there was room. They go before `last`."""
        digest = before.copy()
        digest.update(tokens[at : at + self.page_size].tobytes())
        if not (count := self._make_room(len(pages), last)):
            return 0
        if (same := self._page(digest.digest())) is not None:  # lost, or looked at for that room
            if same.readers:
                return 0
            self._drop(same)
        slots = self._free[: -count - 1 : -1]
        del self._free[-count:]
        held = tokens[at : at + count * self.page_size].copy()
        run = StoredRun(slots, held, before, self.page_size)
        self.store.save(pages[:count], run)  # first: what it has not heard of will never be stored
        group = run.first.group = _Group(self._only, {run.first: None}, run, count)
        self._enter(run.first)
        self._only[group] = None
        self._num_tokens += len(held)
        if last is not None and last.pages:
            self._only.move_to_end(last)
        if self.listener is not None:
            self._look_at(group)
            for end, page in enumerate(run.pages(), at // self.page_size + 1):
                if page.group is group:
                    self.listener.added(page, tokens[: end * self.page_size])
        return count

    def _make_room(self, count: int, last: _Group | None) -> int:
        """Evict until `count` slots are free, but of `last` nothing that would be lost; returns how
        many of these are. The least recently used go first, and the ends of their paths before what
        they follow."""
        if self.below is not None:
            last = None
        while (missing := count - len(self._free)) > 0:
            groups = (group for group in chain(self._copies, self._only) if group is not last)
            if (victim := next(filter(self._is_unread, groups), None)) is None:
                self.num_evicted += missing
                return len(self._free)
            self.num_evicted += self._evict(victim, missing)
        return count

    @staticmethod
    def _is_unread(group: _Group) -> bool:
        return group.run is not None or not all(page.readers for page in group.pages)

    def _evict(self, group: _Group, count: int) -> int:
        """Up to `count` pages from the end of a group; returns how many."""
        gone = 0
        if self.below is not None:
            return self._push_down(group, self.below, count)
        if group.run is not None:
            keep, size = max(1, group.left - count), self.page_size
            slots = group.run.slots[keep : group.left]
            self._free += reversed(slots)
            self._num_tokens -= len(group.run.tokens[keep * size : group.left * size])
            group.left, gone = keep, len(slots)
            if keep > 1:
                return gone
            group.run = None
        while gone < count and group.pages:
            page, _ = group.pages.popitem()  # `reversed` would go over all that have gone before
            group.pages[page] = None
            if page.readers:
                unread = [page for page in group.pages if not page.readers]
                return gone + sum(map(self._drop, unread[gone - count :]))
            gone += self._drop(page)
        return gone

    def _push_down(self, group: _Group, below: LowerTier[S], count: int) -> int:
        """The same, of which `below` gets what the pool has not got as well."""
        if group.run is not None:
            self._look_at(group)
        pages = [page for page in group.pages if not page.readers][-count:]
        if group.order is self._only:
            below.take([page for page in pages if page.state == "stored"])
        return sum(map(self._drop, pages))

    def _use(self, pages: list[StoredPage], order: OrderedDict[_Group, None]) -> _Group | None:
        """Pages of one path are used together now; they are the last in that order."""
        if not pages:
            return None
        group = _Group(order, {})
        order[group] = None
        for page in pages:  # which is in two groups, never in none, if this is cut off
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
        self._num_tokens -= len(page.tokens)
        if self.listener is not None:
            self.listener.dropped(page)
        return True

    @staticmethod
    def _leave(group: _Group | None, page: StoredPage) -> None:
        if group is not None:
            del group.pages[page]
            if not group.pages:
                del group.order[group]

    def check(self) -> None:
        """Assert the invariants: every slot is free or holds one page, found under its tokens."""
        pages = self.in_order()
        assert sorted([page.slot for page in pages] + self._free) == [*range(self.num_slots)]
        assert self._num_tokens == sum(len(page.tokens) for page in pages)
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
