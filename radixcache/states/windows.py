"""Pages of layers with a sliding window: sequences keep one window, saved states share pages.

A query at position p of such a layer sees the keys after p - W. So a running sequence keeps the
pages of its last window alone, in a table beside that of the full layers, which see all tokens. A
saved state at p (`radixcache.states.saved`) holds the pages of (p - W, p) by reference: a page may
belong to several saved states and sequences. Both kinds of pages have the same bytes and come from
one pool; a page of all full layers holds `page_size` tokens, a page of all windowed layers
`WindowIndex.page_size`. Eviction takes the least recently used first, leaf or saved state.

The page at p may be half-filled: its sequence goes on writing behind p, and others read before p. A
sequence that resumes at p copies the page first.

Small windows need no saved state. The last of n windowed layers sees n (W - 1) tokens back, through
those below it. So a sequence computes again as many tokens before the end of the cached KV; there,
all layers are as they were, to the bit. It leaves the KV of full layers alone: its first tokens see
too little, and would spoil that KV for all.

What a sequence leaves behind is found until its memory is used anew (`states.left_pages`). A
prompt resumes at the deepest place before which one whole window is there, in use or free; then
it makes a saved state where it parts from the cached text.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from radixcache.lease import NO_PAGES, Lease, PageCopy, WindowTable
from radixcache.pages import PagePool, Pages
from radixcache.states.left_pages import LeftPages
from radixcache.states.saved import (
    MOST_SAVED_STATES,
    Key,
    Kind,
    SavedState,
    SavedStateIndex,
    key_of,
)
from radixcache.states.stored_windows import StoredWindows
from radixcache.tokens import Tokens

MOST_LOOK_BACK = 256
"""The largest window for which tokens are computed again in place of a saved state."""

MOST_WANTED = 8
"""Waiting prompts whose saved states are evicted last: looking one up hashes all of its tokens."""

LEAST_ENTERED = 64
"""Tokens after which a running sequence lets others find the pages that it has filled."""

_F = TypeVar("_F", bound=Callable[..., Any])


def window_page_size(page_size: int, full: int, windowed: int) -> int:
    """Tokens per page of the windowed layers, beside `page_size` of the full ones.

    Args:
        full, windowed: bytes of a token in all layers of each kind.
    """
    ratio = page_size * full / windowed
    # Round up or down, whichever leaves less of a page empty.
    return max(1, int(ratio) + (int(ratio) * (int(ratio) + 1) < ratio * ratio))


class WindowedCache(Protocol):
    """The part of a cache that `WindowIndex` uses."""

    pool: PagePool
    granularity: int
    caches: ClassVar[bool]
    clock: int
    windows: WindowIndex | None

    def find_pages(self, tokens: Tokens, namespace: Hashable) -> tuple[Pages, int]: ...
    def next_prompts(self, count: int) -> Iterable[tuple[Tokens, Hashable]]: ...
    def change(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def take_pages(self, count: int) -> Pages: ...


class Window(NamedTuple):
    """Consecutive pages of the windowed layers, from the token at position `first` on."""

    first: int
    pages: Pages


@dataclass(slots=True)
class LeftWindow(SavedState[Window]):
    """A window that no saved state holds, and the deepest saved state before it, which counts as
    found: else its kind would seem to be of no use."""

    deepest: SavedState[Window] | None = None


def _change(method: _F) -> _F:
    """Decorates a method that runs as a change of the cache (`radixcache.base.mutation`)."""

    @wraps(method)
    def call(self: WindowIndex, *args: Any) -> Any:
        return self._cache.change(method, self, *args)

    return cast(_F, call)


class WindowIndex(SavedStateIndex[Window]):
    """The window tables of a cache's leases, and the saved states of windows.

    Args:
        cache: gives the pages; its `windows` becomes this index.
        window: number of keys that a query sees, its own included.
        page_size: tokens per page of the windowed layers.
        num_layers: how many layers have the window; 0: no sequence resumes without a saved state.

    Attributes:
        stored: takes windows that are evicted, if there is a tier below the pool.
    """

    stored: StoredWindows | None = None

    def __init__(
        self, cache: WindowedCache, window: int, page_size: int, num_layers: int = 0
    ) -> None:
        self.window, self.page_size = window, page_size
        self._reach = num_layers * (window - 1) if window <= MOST_LOOK_BACK else 0
        self._cache, self._pool = cache, cache.pool
        self.granularity = cache.granularity
        super().__init__(lambda: cache.clock)
        cache.windows = self

    def clear(self) -> None:
        """Forget everything but what is stored, when all pages of the pool are free."""
        super().clear()
        if self.stored is not None:
            self.stored.recover()
        self._refs = np.zeros(self._pool.num_pages, np.int32)
        """How many tables and saved states hold each page; the pool counts them as one holder."""
        self._running = np.zeros(self._pool.num_pages, np.int32)
        """How many tables alone hold each page."""
        self.left = LeftPages(self._pool, self.page_size)
        self._computed: dict[Lease, int] = {}
        """Up to where the step being scheduled computes leases."""
        self._wanted: set[Key] | None = None
        """What waiting prompts resume from; None if they are yet to be looked up in this step."""
        self.num_running = 0
        """Pages that tables hold: these cannot be evicted."""

    @property
    def counts(self) -> dict[str, int]:
        kept = int(np.count_nonzero(self._refs)) - self.num_running
        free, left = self._pool.num_free, self.left.num_left
        return {"running": self.num_running, "kept": kept, "left": left, "free": free - left}

    def tokens_in(self, num_pages: int, step_tokens: int) -> int:
        """Most tokens of a sequence that fit `num_pages` pages of both kinds, if a step computes at
        most `step_tokens`."""
        size, own = self._pool.page_size, self.page_size
        spare = 3  # a page begun before the window, one that is copied, and one begun
        all_kept = (num_pages - spare) * size * own // (size + own)
        one_window = (num_pages - spare - -(-(self.window + step_tokens) // own)) * size
        return max(all_kept, one_window)

    # -- tables --------------------------------------------------------------------------------

    def span(self, num_tokens: int) -> tuple[int, int]:
        """The position from which a window after so many tokens has pages, and how many."""
        first = max(0, num_tokens - self.window + 1) // self.page_size
        return first * self.page_size, -(-num_tokens // self.page_size) - first

    @property
    def looks_back(self) -> bool:
        """Whether sequences can resume without a saved state."""
        return self._reach > 0

    def look_back(self, num_tokens: int) -> tuple[int, int]:
        """From where a sequence resumes without a saved state where KV of so many tokens is cached,
        and the length from which on its window is whole: the last page boundary of the full layers.
        (0, 0): nowhere."""
        if not self._reach:
            return 0, 0
        whole = num_tokens // self._pool.page_size * self._pool.page_size
        start = (whole - self._reach) // self.page_size * self.page_size
        return (start, whole) if start > 0 else (0, 0)

    @_change
    def begin(
        self,
        lease: Lease,
        saved: SavedState[Window] | None = None,
        first: int = 0,
        whole: int = 0,
    ) -> None:
        """Give a lease a table: the saved state's, or an empty one from position `first` on."""
        lease.window = WindowTable(first, NO_PAGES, whole=whole)
        if saved is not None:
            first, pages = saved.held
            self._hold(pages)
            self._run(pages)
            used = saved.key.length % self.page_size
            lease.window = WindowTable(first, pages, used)

    def missing(self, lease: Lease, num_tokens: int) -> int:
        """Pages that `reserve` would take."""
        table, size = lease.window, self.page_size
        assert table is not None
        end = table.first + len(table.pages) * size
        wanted = max(0, -(-(num_tokens - end) // size))
        return wanted + (table.shared_slots > 0 and num_tokens > end - size + table.shared_slots)

    @_change
    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Lengthen the table to hold `num_tokens` tokens; evict if needed.

        Raises:
            OutOfPages: nothing has changed.
        """
        table, count = lease.window, self.missing(lease, num_tokens)
        assert table is not None
        if not count:
            return
        pages = self._cache.take_pages(count)
        self._refs[pages] = 1
        self._run(pages)
        if table.shared_slots:  # a saved state holds the last page, too
            table.copied = table.pages[-1:]
            table.copies.append(PageCopy(table.copied.item(), pages.item(0), table.shared_slots))
            table.pages, table.shared_slots = table.pages[:-1], 0
        table.pages = np.concatenate([table.pages, pages])

    @_change
    def slide(self, lease: Lease, num_tokens: int) -> None:
        """Drop pages that no query at `num_tokens` or later sees, and those that were copied."""
        table = lease.window
        assert table is not None
        behind = (num_tokens - self.window + 1 - table.first) // self.page_size
        if num_tokens - table.known >= min(LEAST_ENTERED, self.window):
            self._enter(lease, table, num_tokens)
        if len(table.copied) and not table.copies:
            self._stop(table.copied)
            table.copied = NO_PAGES
        if behind > 0:
            dropped, table.pages = table.pages[:behind], table.pages[behind:]
            table.first += behind * self.page_size
            self._stop(dropped)

    def drop(self, lease: Lease) -> None:
        """Take the table of a lease, within a change of the cache."""
        table, lease.window = lease.window, None
        self._computed.pop(lease, None)
        if table is not None:
            self._stop(table.pages)
            self._stop(table.copied)

    # -- saved states ---------------------------------------------------------------------------

    def depth(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        left, _ = self._find_left(tokens, namespace, limit)
        return max(super().depth(tokens, namespace, limit), left)

    def resume(self, tokens: Tokens, namespace: Hashable, limit: int) -> tuple[int, int]:
        """From where a sequence resumes if KV of `limit` tokens is cached, and how much of this KV
        it needs: up to a saved state, or all of it. Changes nothing. O(limit)."""
        depth, (start, _) = self.depth(tokens, namespace, limit), self.look_back(limit)
        return (start, limit) if start > depth else (depth, depth)

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> SavedState[Window] | None:
        """As in `SavedStateIndex`, or a `LeftWindow` that is deeper."""
        found = super().find(tokens, namespace, limit)
        end, window = self._find_left(tokens, namespace, limit)
        if end <= (0 if found is None else found.key.length):
            return found
        return LeftWindow(Key(namespace, end, b""), window, "branch", deepest=found)

    def release(self, saved: SavedState[Window]) -> None:
        found = saved.deepest if isinstance(saved, LeftWindow) else saved
        if found is not None:
            super().release(found)

    @_change
    def pin(self, tokens: Tokens, namespace: Hashable) -> None:
        """As in `SavedStateIndex`; a window that was merely left is kept from now on."""
        whole = tokens[: len(tokens) // self.page_size * self.page_size]
        for one in (tokens, whole):
            super().pin(one, namespace)
        end, window = self._find_left(tokens, namespace, len(tokens))
        key = key_of(whole, namespace)
        if end == len(whole) > 0 and self._is_new(key, "branch"):
            self._hold(window.pages)
            self._add(self._kept, key, window, "branch")

    def unpin(self, tokens: Tokens, namespace: Hashable) -> None:
        for one in (tokens, tokens[: len(tokens) // self.page_size * self.page_size]):
            super().unpin(one, namespace)

    def _find_left(self, tokens: Tokens, namespace: Hashable, limit: int) -> tuple[int, Window]:
        """The deepest window whose pages are there, held or not, behind its end. O(limit)."""
        table, length = self._cache.find_pages(tokens[:limit], namespace)
        first, pages = self.left.find(table, length, self.window)
        return (first + len(pages)) * self.page_size, Window(first * self.page_size, pages)

    def in_flight(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        ahead = super().in_flight(tokens, namespace, limit)
        if self._computed:
            table, limit = self._cache.find_pages(tokens[:limit], namespace)
            full = self._pool.page_size
            for lease, end in self._computed.items():
                end = min(limit, end) // self.page_size * self.page_size
                own = lease.page_table[: end // full]
                if end > ahead and len(own) and np.array_equal(own, table[: len(own)]):
                    ahead = end
        return ahead

    def compute(self, lease: Lease, num_tokens: int) -> None:
        """The step being scheduled computes a lease up to `num_tokens` tokens: once it has run,
        others find the windows that it leaves behind."""
        if self._cache.caches and lease.window is not None and num_tokens >= lease.window.whole:
            self._computed[lease] = num_tokens

    @_change
    def enter(self, lease: Lease, num_tokens: int) -> None:
        """Let others find the whole pages of the lease's first `num_tokens` tokens, which are
        computed."""
        assert lease.window is not None
        self._enter(lease, lease.window, num_tokens)

    def _enter(self, lease: Lease, table: WindowTable, num_tokens: int) -> None:
        size, known = self.page_size, table.known
        table.known = max(known, num_tokens // size * size)
        if table.whole:  # what lies before was not computed from whole windows
            known = max(known, table.whole - self.window + 1)
        numbers = np.arange(-(-known // size), num_tokens // size)
        if len(numbers) and self._cache.caches:
            pages = table.pages[numbers - table.first // size]
            self.left.enter(lease.page_table, numbers, pages, table.near)

    def commit(self) -> None:
        super().commit()
        self._computed.clear()
        self._wanted = None

    @_change
    def write(self, lease: Lease, tokens: Tokens, kind: Kind) -> SavedState[Window] | None:
        """A saved state after `tokens`, which the step being scheduled writes into the lease's
        table; `commit` makes it findable; None if there is one already. O(len(tokens))."""
        return self._keep(self._written, lease, tokens, kind)

    @_change
    def keep(
        self, lease: Lease, tokens: Tokens, before: Iterable[Key] = (), kind: Kind = "end"
    ) -> None:
        """Make a saved state after `tokens`, all of which are computed, or were loaded.

        Args:
            before: the saved states that the sequence resumed from, or left.
        """
        assert lease.window is not None
        if lease.window.copies or not len(tokens):  # nothing is new, and a page not yet copied
            return
        saved = self._keep(self._kept, lease, tokens, kind)
        if saved is not None:
            self._supersede(saved.key, before)

    def _keep(
        self, to: dict[Key, SavedState[Window]], lease: Lease, tokens: Tokens, kind: Kind
    ) -> SavedState[Window] | None:
        table, size, position = lease.window, self.page_size, len(tokens)
        key = key_of(tokens, lease.namespace)
        assert table is not None
        if not self._is_new(key, kind):
            return None
        if len(self._kept) + len(self._written) >= MOST_SAVED_STATES:
            self.evict()
        first, count = self.span(position)
        skipped = (first - table.first) // size
        assert skipped >= 0, "a part of the window is gone"
        pages = table.pages[skipped : skipped + count].copy()
        self._hold(pages)
        return self._add(to, key, Window(first, pages), kind)

    def _is_wanted(self, key: Key) -> bool:
        """As in `SavedStateIndex`; the next prompts want what they resume from."""
        if self._wanted is None:
            self._wanted = set()
            for tokens, namespace in self._cache.next_prompts(MOST_WANTED):
                found, _ = self._deepest(tokens, namespace, len(tokens))
                self._wanted |= set() if found is None else {found.key}
        return key in self._wanted or super()._is_wanted(key)

    def evict(self, last_use: int | None = None) -> bool:
        """Evict a saved state that is useless or was last used at `last_use` or before. Without
        `last_use`, evict any, pinned ones last. Returns whether one went, which need not free a
        page. Within a change of the cache."""
        victim = self._victim(pinned=last_use is None)
        if victim is None:
            return False
        is_dead = victim.key in self._superseded or victim.kind in self._rare_kinds()
        is_young = last_use is not None and self._age(victim) < self._clock() - last_use + 1
        if is_young and not is_dead:
            return False
        self._remove(victim)
        is_spare = victim.kind == "prompt" and not victim.hits and self._ends_pay
        if self.stored is not None and not is_dead and not is_spare and victim.kind != "near":
            self.stored.demote(victim, victim.held.pages)
        self._drop(victim.held.pages)
        return True

    def forget(self) -> None:
        """Drop all saved states, while no lease has a table, within a change of the cache."""
        self._pool.drop(np.flatnonzero(self._refs).astype(np.int32))
        self.clear()
        if self.stored is not None:
            self.stored.clear()

    def recover(self) -> None:
        for key, saved in self._written.items():
            if key not in self._kept:  # else `commit` was cut off
                self._drop(saved.held.pages)
        super().recover()
        self._computed.clear()
        if self.stored is not None:
            self.stored.recover()

    # -- holders -------------------------------------------------------------------------------

    def _hold(self, pages: Pages) -> None:
        left = pages[self._refs[pages] == 0]
        if len(left):
            self.left.take_back(left)
        self._refs[pages] += 1

    def _run(self, pages: Pages) -> None:
        """Count one more table for these pages."""
        self._running[pages] += 1
        self.num_running += int(np.count_nonzero(self._running[pages] == 1))

    def _stop(self, pages: Pages) -> None:
        """Count one table less for these pages."""
        self._running[pages] -= 1
        self.num_running -= int(np.count_nonzero(self._running[pages] == 0))
        self._drop(pages)

    def _drop(self, pages: Pages) -> None:
        self._refs[pages] -= 1
        self._pool.drop(pages[self._refs[pages] == 0])

    def check(self, leases: Iterable[Lease]) -> Pages:
        """Assert every invariant; returns [num_pages] 1 for each page that the index holds."""
        refs, running = np.zeros_like(self._refs), np.zeros_like(self._refs)
        for lease in leases:
            if (table := lease.window) is not None:
                assert table.first % self.page_size == 0
                np.add.at(running, np.concatenate([table.pages, table.copied]), 1)
        for saved in [*self._kept.values(), *self._written.values()]:
            (first, pages), length = saved.held, saved.key.length
            assert first <= max(0, length - self.window + 1)
            assert first + (len(pages) - 1) * self.page_size < length, "a page too many"
            assert length <= first + len(pages) * self.page_size, "a page too few"
            np.add.at(refs, pages, 1)
        assert np.array_equal(refs + running, self._refs), "holders of windows' pages miscounted"
        assert np.array_equal(running, self._running)
        assert self.num_running == np.count_nonzero(running)
        self._check_keys()
        if self.stored is not None:
            self.stored.check()
        assert not self._computed.keys() - {*leases}, "computed for no lease"
        for lease in leases:
            if (table := lease.window) is not None:
                assert table.first <= table.known <= max(lease.capacity, table.first)
        self.left.check(self._refs > 0)
        return (self._refs > 0).astype(np.int32)
