"""Measures memory by use, and time spent in the cache, at the index level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from radixcache import HashBlockCache, PrefixCache, RadixCache
from radixcache.bench.machine import Stopwatch
from radixcache.bench.schemes.page_aligned import PageAlignedRadixCache
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.request import Sequence


class Survey(NamedTuple):
    """Pages that requests use or the cache keeps, and their slots without a token."""

    held_pages: int
    empty_slots: int


def survey(cache: PrefixCache, running: list[Sequence]) -> Survey:
    """Look at every page. O(pages + nodes)."""
    size, num_pages = cache.page_size, cache.pool.num_pages
    filled = np.zeros(num_pages, np.int32)
    if isinstance(cache, RadixCache):
        for node in cache._tree:
            if node.num_pages:
                filled[node.pages[:-1]] = size
                last = int(node.pages[-1])
                filled[last] = max(filled[last], (node.end - 1) % size + 1)
    elif isinstance(cache, PageAlignedRadixCache):
        for node in cache.tree._tree:
            filled[node.pages] = size
    elif filled_slots := getattr(cache, "filled_slots", None):
        filled = filled_slots()
    elif isinstance(cache, HashBlockCache):
        filled[[page for page, block in enumerate(cache._blocks) if block is not None]] = size
    held = np.zeros(num_pages, bool)
    for sequence in running:
        if sequence.lease is not None:
            table, length = sequence.lease.page_table, sequence.num_computed
            held[table] = True
            whole = length // size
            filled[table[:whole]] = size
            if length % size:
                last = int(table[whole])
                filled[last] = max(filled[last], length % size)
    held |= filled > 0
    pages = int(np.count_nonzero(held))
    return Survey(pages, pages * size - int(filled[held].sum()))


class WatchedScheduler(Scheduler):
    """A scheduler that surveys the pages at one of `survey_every` admissions."""

    def __init__(self, *args: Any, survey_every: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.surveys: list[Survey] = []
        self._survey_every, self._admissions = survey_every, 0
        self._known: set[Sequence] = set()

    def schedule(self) -> list[Chunk]:
        chunks = super().schedule()
        for sequence in {c.sequence for c in chunks} - self._known:
            if not sequence.preemptions:
                if self._admissions % self._survey_every == 0:
                    self.surveys.append(survey(self.cache, self.running))
                self._admissions += 1
        self._known = set(self.running)
        return chunks


_METHODS = ("match", "acquire", "reserve", "publish", "commit", "release")


class CacheTime:
    """Measures the processor time that a thread spends in a cache, by wrapping its methods."""

    def __init__(self, cache: PrefixCache) -> None:
        self._watch = Stopwatch()
        for name in _METHODS:
            setattr(cache, name, self._timed(getattr(cache, name)))

    @property
    def seconds(self) -> float:
        return sum(self._watch.ns.values()) / 1e9

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._watch.start()
            try:
                return method(*args, **kwargs)
            finally:
                self._watch.lap("the cache")

        return call
