"""Pages of layers with a sliding window: sequences keep one window, checkpoints share pages.

A query at position p of such a layer sees the keys after p - W. So a running sequence keeps the
pages of its last window alone, in a table beside that of the full layers, which see all tokens. A
checkpoint at p (`radixcache.checkpoints`) holds the pages of (p - W, p) by reference: a page may
belong to several checkpoints and sequences. Both kinds of pages have the same bytes and come from
one pool; a page of all full layers holds `page_size` tokens, a page of all windowed layers
`WindowIndex.page_size`. Eviction takes the least recently used first, leaf or checkpoint.

The page at p may be half-filled: its sequence goes on writing behind p, and others read before p. A
sequence that resumes at p copies the page first.

Small windows need no checkpoint. The last of n windowed layers sees n (W - 1) tokens back, through
those below it: from a position so far before the end of the cached KV, a sequence computes tokens
again, but leaves the KV of full layers alone, which its first tokens would spoil for all; at the
end all layers are as they were, to the bit.

The pages of a checkpoint that is no longer than a window begin at the first token, so that others
can go on from anywhere within; they look at multiples of `WindowIndex.grid` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import wraps
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from radixcache.checkpoints import (
    MOST_CHECKPOINTS,
    Checkpoint,
    CheckpointIndex,
    Key,
    Kind,
    key_of,
)
from radixcache.lease import NO_PAGES, Lease, PageCopy, WindowTable
from radixcache.nodes import Tokens
from radixcache.pages import PagePool, Pages
from radixcache.stored_windows import StoredWindows

MOST_LOOK_BACK = 256
"""The largest window for which tokens are computed again in place of a checkpoint."""

MIN_GRID, MOST_PLACES = 16, 64
"""Places inside a checkpoint are so many tokens apart at least, and there are about so many."""

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
    clock: int
    windows: WindowIndex | None

    def change(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def take_pages(self, count: int) -> Pages: ...


class Window(NamedTuple):
    """Consecutive pages of the windowed layers, from the token at position `first` on."""

    first: int
    pages: Pages


def _change(method: _F) -> _F:
    """Decorates a method that runs as a change of the cache (`radixcache.base.mutation`)."""

    @wraps(method)
    def call(self: WindowIndex, *args: Any) -> Any:
        return self._cache.change(method, self, *args)

    return cast(_F, call)


class WindowIndex(CheckpointIndex[Window]):
    """The window tables of a cache's leases, and the checkpoints of windows.

    Args:
        cache: gives the pages; its `windows` becomes this index.
        window: number of keys that a query sees, its own included.
        page_size: tokens per page of the windowed layers.
        num_layers: how many layers have the window; 0: no sequence resumes without a checkpoint.

    Attributes:
        stored: takes windows that are evicted, if there is a tier below the pool.
    """

    stored: StoredWindows | None = None

    def __init__(
        self, cache: WindowedCache, window: int, page_size: int, num_layers: int = 0
    ) -> None:
        self.window, self.page_size = window, page_size
        self._reach = num_layers * (window - 1) if window <= MOST_LOOK_BACK else 0
        self.grid = max(MIN_GRID, window // MOST_PLACES)
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
        """How many tables and checkpoints hold each page; the pool counts them as one holder."""
        self._running = np.zeros(self._pool.num_pages, np.int32)
        """How many tables alone hold each page."""
        self._holders: dict[Key, dict[Key, None]] = {}
        """The checkpoints that hold all of these tokens, whose number `grid` divides."""
        self._inside: dict[Key, list[Key]] = {}
        """The inverse: by checkpoint, the prefixes that its pages hold."""
        self.num_running = 0
        """Pages that tables hold: these cannot be evicted."""

    @property
    def counts(self) -> dict[str, int]:
        kept = int(np.count_nonzero(self._refs)) - self.num_running
        return {"running": self.num_running, "kept": kept, "free": self._pool.num_free}

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

    def look_back(self, num_tokens: int) -> tuple[int, int]:
        """From where a sequence resumes without a checkpoint where KV of so many tokens is cached,
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
        checkpoint: Checkpoint[Window] | None = None,
        first: int = 0,
        whole: int = 0,
    ) -> None:
        """Give a lease a table: the checkpoint's, or an empty one from position `first` on."""
        lease.window = WindowTable(first, NO_PAGES, whole=whole)
        if checkpoint is not None:
            first, pages = checkpoint.held
            self._hold(pages)
            self._run(pages)
            used = checkpoint.key.length % self.page_size
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
        if table.shared_slots:  # a checkpoint holds the last page, too
            table.copied = table.pages[-1:]
            table.copies.append(PageCopy(table.copied.item(), pages.item(0), table.shared_slots))
            table.pages, table.shared_slots = table.pages[:-1], 0
        table.pages = np.concatenate([table.pages, pages])

    @_change
    def slide(self, lease: Lease, num_tokens: int) -> None:
        """Drop pages that no query at `num_tokens` or later sees, and those that were copied."""
        table = lease.window
        assert table is not None
        if len(table.copied) and not table.copies:
            self._stop(table.copied)
            table.copied = NO_PAGES
        behind = (num_tokens - self.window + 1 - table.first) // self.page_size
        if behind > 0:
            dropped, table.pages = table.pages[:behind], table.pages[behind:]
            table.first += behind * self.page_size
            self._stop(dropped)

    def drop(self, lease: Lease) -> None:
        """Take the table of a lease, within a change of the cache."""
        table, lease.window = lease.window, None
        if table is not None:
            self._stop(table.pages)
            self._stop(table.copied)

    # -- checkpoints ---------------------------------------------------------------------------

    def depth(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        inner, _ = self._deepest_inside(tokens, namespace, limit)
        return max(super().depth(tokens, namespace, limit), inner.length if inner else 0)

    def resume(self, tokens: Tokens, namespace: Hashable, limit: int) -> tuple[int, int]:
        """From where a sequence resumes if KV of `limit` tokens is cached, and how much of this KV
        it needs: up to a checkpoint, or all of it. Changes nothing. O(limit)."""
        depth, (start, _) = self.depth(tokens, namespace, limit), self.look_back(limit)
        return (start, limit) if start > depth else (depth, depth)

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> Checkpoint[Window] | None:
        """As in `CheckpointIndex`; a place inside a checkpoint counts, as one that is not kept."""
        inner, _ = self._deepest_inside(tokens, namespace, limit)
        found, _ = self._deepest(tokens, namespace, limit)
        if inner is None or (found is not None and inner.length <= found.key.length):
            return None if found is None else self._hit(found)
        key = next(key for key in reversed(self._holders[inner]) if key in self._kept)
        holder = self._hit(self._kept[key])
        pages = holder.held.pages[: -(-inner.length // self.page_size)]
        return Checkpoint(inner, Window(0, pages), holder.kind, hits=1, inside=holder)

    def in_flight(self, tokens: Tokens, namespace: Hashable, limit: int) -> int:
        if not self._written:
            return 0
        _, inner = self._deepest_inside(tokens, namespace, limit)
        return max(super().in_flight(tokens, namespace, limit), inner)

    def _deepest_inside(
        self, tokens: Tokens, namespace: Hashable, limit: int
    ) -> tuple[Key | None, int]:
        """The deepest place inside a kept checkpoint, and the length of the deepest in one that the
        step writes. O(window)."""
        found, ahead = None, 0
        for place in self._places(tokens, namespace, min(limit, self.window)):
            holders = self._holders.get(place)
            if holders is None:  # nor is there a deeper one
                break
            found = place if any(key in self._kept for key in reversed(holders)) else found
            ahead = place.length if any(key in holders for key in self._written) else ahead
        return found, ahead

    def _places(self, tokens: Tokens, namespace: Hashable, limit: int) -> Iterator[Key]:
        """Prefixes of at most `limit` tokens. O(limit)."""
        digest = blake2b(digest_size=32)
        for end in range(self.grid, limit + 1, self.grid):
            digest.update(tokens[end - self.grid : end].tobytes())
            yield Key(namespace, end, digest.copy().digest())

    @_change
    def write(self, lease: Lease, tokens: Tokens, kind: Kind) -> Checkpoint[Window] | None:
        """A checkpoint after `tokens`, which the step being scheduled writes into the lease's
        table; `commit` makes it findable; None if there is one already. O(len(tokens))."""
        return self._keep(self._written, lease, tokens, kind)

    @_change
    def keep(
        self, lease: Lease, tokens: Tokens, before: Iterable[Key] = (), kind: Kind = "end"
    ) -> None:
        """Make a checkpoint after `tokens`, all of which are computed, or were loaded.

        Args:
            before: the checkpoints that the sequence resumed from, or left.
        """
        assert lease.window is not None
        if lease.window.copies or not len(tokens):  # nothing is new, and a page not yet copied
            return
        checkpoint = self._keep(self._kept, lease, tokens, kind)
        if checkpoint is not None:
            self._supersede(checkpoint.key, before)

    def _keep(
        self, to: dict[Key, Checkpoint[Window]], lease: Lease, tokens: Tokens, kind: Kind
    ) -> Checkpoint[Window] | None:
        table, size, position = lease.window, self.page_size, len(tokens)
        key = key_of(tokens, lease.namespace)
        assert table is not None
        if not self._is_new(key):
            return None
        if len(self._kept) + len(self._written) >= MOST_CHECKPOINTS:
            self.evict()
        first, count = self.span(position)
        skipped = (first - table.first) // size
        assert skipped >= 0, "a part of the window is gone"
        pages = table.pages[skipped : skipped + count].copy()
        self._hold(pages)
        if not first:
            self._inside[key] = [*self._places(tokens, lease.namespace, position)]
            for place in self._inside[key]:
                self._holders.setdefault(place, {})[key] = None
        return self._add(to, key, Window(first, pages), kind)

    def evict(self, last_use: int | None = None) -> bool:
        """Evict a checkpoint if one is useless, or was last used at `last_use` or before, or, if
        that is None, any, pinned ones last; returns whether one went, which need not free a page.
        Within a change of the cache."""
        victim = self._victim(pinned=last_use is None)
        if victim is None:
            return False
        is_dead = victim.key in self._superseded or victim.kind in self._rare_kinds()
        if last_use is not None and not is_dead and victim.last_use > last_use:
            return False
        self._remove(victim)
        is_spare = victim.kind == "prompt" and not victim.hits and self._ends_pay
        if self.stored is not None and not is_dead and not is_spare:
            self.stored.demote(victim, victim.held.pages)
        self._forget(victim)
        return True

    def _forget(self, checkpoint: Checkpoint[Window]) -> None:
        self._drop(checkpoint.held.pages)
        for place in self._inside.pop(checkpoint.key, ()):
            holders = self._holders[place]
            del holders[checkpoint.key]
            if not holders:
                del self._holders[place]

    def forget(self) -> None:
        """Drop all checkpoints, while no lease has a table, within a change of the cache."""
        self._pool.drop(np.flatnonzero(self._refs).astype(np.int32))
        self.clear()
        if self.stored is not None:
            self.stored.clear()

    def recover(self) -> None:
        for key, checkpoint in self._written.items():
            if key not in self._kept:  # else `commit` was cut off
                self._forget(checkpoint)
        super().recover()
        if self.stored is not None:
            self.stored.recover()

    # -- holders -------------------------------------------------------------------------------

    def _hold(self, pages: Pages) -> None:
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
        for checkpoint in [*self._kept.values(), *self._written.values()]:
            (first, pages), length = checkpoint.held, checkpoint.key.length
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
        holders = {(place, key) for place, keys in self._holders.items() for key in keys}
        assert holders == {(place, key) for key, places in self._inside.items() for place in places}
        assert self._inside.keys() == {
            checkpoint.key
            for checkpoint in [*self._kept.values(), *self._written.values()]
            if not checkpoint.held.first
        }
        return (self._refs > 0).astype(np.int32)
