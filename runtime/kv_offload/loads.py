"""Loads pages from the tiers below the pool, for requests that wait for them.

The pages by which a tier extends the hit of a waiting request are read, so many bytes at a time,
while other requests run. When they have been read, the scheduler looks the request up, and they are
copied into the pool and lengthen its hit: one such piece a step, whose time is taken off the tokens
that the step may compute. What a load cannot bring (a page is gone, or spoilt) is computed.

Whether loading pays is measured: bytes read and copied a second against tokens computed a second,
both while running. Where that is uncertain, one of several loads is decided the other way, so that
the measurements do not grow old.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch

from radixcache.errors import OutOfPages
from radixcache.lease import Lease
from radixcache.radix.cache import RadixCache
from radixcache.runtime.kv_offload.below import find_below
from radixcache.runtime.kv_offload.page_loader import PageLoader
from radixcache.runtime.kv_offload.store import PrefillTime, Store
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.request import Sequence
from radixcache.states.stored_windows import StoredWindow
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import LoadCost, Medium, StoredPage

_TRIES = 3
"""Loads in vain, as the pool evicted the tokens before them; then the request is computed."""

_TRY_AGAIN = 16
"""One of so many loads that may or may not pay is decided otherwise: the disk may have been busy,
or long prefills may be faster than short ones tell."""

_SHORT = 32
"""A token of a short prefill may take so many times as long as one of a long one (19 times at 64
tokens against 8,192: H100, Llama of 1.2 B)."""

_MANY = 32
"""Prefills of fewer tokens do not tell how long a token takes."""

_WAIT = 0.005
"""Seconds that an engine with nothing to compute waits for a load at a time."""


@dataclass
class _Load:
    """Pages on their way: of the prefix of `end` tokens, from index `first` of the table on, or of
    a window."""

    tier: LowerTier[Store]
    pages: list[StoredPage]
    first: int
    end: int
    window: StoredWindow | None
    rows: Future[torch.Tensor]
    began: float


class Loads(PageLoader):
    """The loads of one engine.

    Args:
        cache: has the tiers; a page that is in two of them is read from the upper one.
        pool: takes the pages.

    Attributes:
        computing: how long prefills take.
    """

    def __init__(self, cache: RadixCache, pool: KVPool) -> None:
        assert cache.lower is not None
        self.computing = PrefillTime()
        self._tiers: list[LowerTier[Store]] = [*cache.lower.chain()]
        self._cache, self._pool = cache, pool
        self._loads: dict[Sequence, _Load] = {}
        self._tries: dict[Sequence, int] = {}
        self._orphaned: list[_Load] = []
        """Loads of sequences that have gone; their slots are still being read."""
        self._looked: dict[Sequence, int] = {}
        """Sequences that wait for others' loads to end: `_num_ended` when the tier was searched."""
        self._num_uncertain = self._num_ended = 0
        self._step_is_full = False
        self._seconds = self._uncharged = 0.0
        """Seconds of the step that loads take; those not charged to its tokens yet."""
        self._saving = 0.0
        """Seconds that stores had spent on `save` when the step began: these are no cost of loads,
        since computing evicts as much."""

    @property
    def pending(self) -> bool:  # type: ignore[override]
        return bool(self._loads or self._orphaned)

    def begin_step(self) -> None:
        self._step_is_full = False
        for load in [load for load in self._orphaned if load.rows.done()]:
            self._orphaned.remove(load)
            load.tier.end_load(load.pages)
            self._num_ended += 1

    def waits(self, sequence: Sequence) -> bool:
        load = self._loads.get(sequence)
        if load is None:
            return self._looked.get(sequence) == self._num_ended
        return not load.rows.done() or self._step_is_full

    def has_read(self, sequence: Sequence) -> bool:
        return sequence in self._loads and not self.waits(sequence)

    def load(self, sequence: Sequence, lease: Lease) -> bool:
        if self.has_read(sequence):
            self._end(sequence, lease)
        return self._begin(sequence, lease)

    def _end(self, sequence: Sequence, lease: Lease) -> None:
        """Bring what was read for a sequence into its lease, or into a saved state."""
        load, start = self._loads[sequence], lease.num_tokens
        if load.window is None:
            self._copy_in(sequence, lease, load)
            end = place = lease.num_tokens
        else:
            start, end = self._copy_window(sequence, lease, load, load.window)
            place = load.end
        loaded = place - load.first * self._pool.page_size if end > start else 0
        load.tier.end_load(load.pages, loaded)
        del self._loads[sequence]
        self._num_ended += 1
        if loaded:
            self._tries.pop(sequence, None)
            seconds = perf_counter() - load.began
            sequence.note_load(load.tier.medium, start, end, seconds)

    def _begin(self, sequence: Sequence, lease: Lease) -> bool:
        """Begin to read what a tier has beyond the lease; False if there is nothing that pays."""
        start, size = lease.num_tokens, self._pool.page_size
        if sequence.request.namespace is not None or sequence.scoring is not None:
            return False
        cache, tokens = self._cache, sequence.tokens[:-1]
        below = find_below(self._tiers[0], cache.windows, tokens, start)
        if below is None or self._tries.get(sequence, 0) == _TRIES:
            return False
        tier, pages, first, end, num_pages, gain, window = below
        store, page_bytes = tier.store, self._pool.page_bytes
        most = max(1, store.most_bytes // page_bytes)
        if len(pages) > most and window is None:
            pages, end = pages[:most], (first + most) * size
            if cache.windows is None:
                num_pages, gain = most, end - start
        if not self._is_to_be_loaded(tier, num_pages, gain):
            return False
        for load in self._orphaned:  # take over a load that reads these pages already
            same = sum(a is b for a, b in zip(load.pages, pages, strict=False))
            if same and load.first == first:
                self._orphaned.remove(load)
                load.end = min(end, (first + same) * size)
                self._loads[sequence] = load
                return True
        is_coming = pages[0].readers > 0  # for another sequence
        loading = sum(load.tier is tier for load in self._loads.values())
        if len(pages) > most:  # a large window is read whole, and alone
            is_coming |= loading > 0
        if loading < store.most_loading and not is_coming:
            if store.in_stream:
                self._wait_for(store.read_seconds(len(pages) * page_bytes))
            rows = store.read(pages)
            self._loads[sequence] = _Load(tier, pages, first, end, window, rows, perf_counter())
            self._tries[sequence] = self._tries.get(sequence, 0) + 1
            tier.begin_load(pages)
        else:
            self._looked[sequence] = self._num_ended
        return True

    def cost(self, medium: Medium, num_pages: int, num_tokens: int) -> LoadCost:
        """The cost of loading `num_pages` pages, and of computing `num_tokens` tokens instead."""
        (tier,) = (tier for tier in self._tiers if tier.medium == medium)
        load = tier.store.load_seconds(num_pages * self._pool.page_bytes)
        return LoadCost(load, self.computing.seconds(num_tokens))

    def _is_to_be_loaded(self, tier: LowerTier[Store], num_pages: int, num_tokens: int) -> bool:
        load, compute = cost = self.cost(tier.medium, num_pages, num_tokens)
        if load is None or compute is None:
            return True
        if cost.pays and (self.computing.knows(num_tokens) or load * _SHORT < compute):
            return True
        self._num_uncertain += 1
        return cost.pays == (self._num_uncertain % _TRY_AGAIN > 0)

    def _wait_for(self, seconds: float | None) -> None:
        self._seconds += seconds or 0.0
        self._uncharged += seconds or 0.0

    def charge(self, budget: int) -> int:
        """At least half of `budget` is left, so that requests go on."""
        token = self.computing.seconds(1)
        cost = 0 if token is None else int(self._uncharged / token)
        self._uncharged = 0.0
        return budget - min(cost, budget // 2)

    def _copy_in(self, sequence: Sequence, lease: Lease, load: _Load) -> None:
        """Copy into the pool what was read beyond the lease, and lengthen the lease by it."""
        begun, size, rows = perf_counter(), self._pool.page_size, load.rows.result()
        saving = self._all_saving()
        end = min(load.end, (load.first + len(rows)) * size)
        start = lease.num_tokens
        if not load.first * size <= start // size * size <= start < end:
            return  # the tokens before the pages were evicted, or the pool has all of them
        if not load.tier.holds(load.pages[0]):
            return
        with suppress(OutOfPages):
            self._cache.reserve(lease, end)
            table = lease.page_table[start // size : -(-end // size)]
            skipped, copies = start // size - load.first, perf_counter()
            rows = rows[skipped : skipped + len(table)]
            self._pool.write_pages(table, rows)
            load.tier.store.copying.note(rows.nbytes, perf_counter() - copies)
            self._cache.load(lease, sequence.tokens[start:end])
            self._step_is_full = True
            self._wait_for(perf_counter() - begun)
            self._saving += self._all_saving() - saving  # it is part of that time

    def _copy_window(
        self, sequence: Sequence, lease: Lease, load: _Load, window: StoredWindow
    ) -> tuple[int, int]:
        """Make a saved state of a window that was read; returns which tokens it holds: none if a
        page was lost, or the pool has no room."""
        begun, rows, index = perf_counter(), load.rows.result(), self._cache.windows
        saving, end = self._all_saving(), window.length
        assert index is not None
        start, count = index.span(end)
        if len(rows) < count or not load.tier.holds(load.pages[0]):
            return start, start
        index.begin(lease, None, start)
        try:
            index.reserve(lease, end)
            assert lease.window is not None
            copies = perf_counter()
            self._pool.write_pages(lease.window.pages, rows[:count])
            load.tier.store.copying.note(rows.nbytes, perf_counter() - copies)
            index.keep(lease, sequence.tokens[:end], (), window.kind)
            self._step_is_full = True
            self._wait_for(perf_counter() - begun)
            self._saving += self._all_saving() - saving  # it is part of that time
        except OutOfPages:
            end = start
        self._cache.change(index.drop, lease)  # it lent the saved state its table
        return start, end

    def forget(self, sequence: Sequence) -> None:
        self._tries.pop(sequence, None)
        self._looked.pop(sequence, None)
        if sequence in self._loads:
            self._orphaned.append(self._loads.pop(sequence))
            self._num_ended += 1

    def recover(self) -> None:
        self._looked.clear()  # a load may have ended without being counted
        loads = [*self._loads.values(), *self._orphaned]
        for tier in self._tiers:
            tier.recover([load.pages for load in loads if load.tier is tier])

    def note_step(self, num_tokens: int, seconds: float) -> None:
        saving = self._all_saving()
        seconds -= self._seconds + saving - self._saving
        self._seconds, self._saving = 0.0, saving
        if num_tokens >= _MANY and seconds > 0:
            self.computing.note(num_tokens, seconds)

    def _all_saving(self) -> float:
        return sum(tier.store.saving for tier in self._tiers)

    def wait(self) -> None:
        loads = [*self._loads.values(), *self._orphaned]
        wait([load.rows for load in loads], _WAIT, "FIRST_COMPLETED")

    def check(self, waiting: Collection[Sequence]) -> None:
        assert {*self._loads, *self._tries, *self._looked} <= {*waiting}, "loads for no sequence"
        readers = sum(page.readers for tier in self._tiers for page in tier.in_order())
        loads = [*self._loads.values(), *self._orphaned]
        assert readers <= sum(len(load.pages) for load in loads), "pages without a load are read"
