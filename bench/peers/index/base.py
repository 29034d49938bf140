"""What the benchmark asks of an index, and how it takes the time."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.peers.index.trace_t import Replayed

Tokens = NDArray[np.int32]

clock = time.thread_time_ns


class Stopwatch:
    """Thread CPU time by phase, less what reading the clock costs.

    Each `lap` books the time since the last `start` or `lap`.
    """

    def __init__(self) -> None:
        self.ns: dict[str, float] = {}
        self.cost = 0.0
        """Nanoseconds that a lap of nothing takes."""
        self._last = clock()
        laps = []
        for _ in range(50):
            self.start()
            for _ in range(100):
                self.lap("nothing")
            laps.append(self.take()["nothing"] / 100)
        self.cost = sorted(laps)[len(laps) // 2]

    def start(self) -> None:
        """Time from now on."""
        self._last = clock()

    def lap(self, phase: str) -> None:
        """Book the time since the last reading under `phase`, and go on."""
        now = clock()
        self.ns[phase] = self.ns.get(phase, 0.0) + now - self._last - self.cost
        self._last = clock()

    def take(self) -> dict[str, float]:
        """The times so far, nanoseconds by phase; starts again from nothing."""
        ns, self.ns = self.ns, {}
        return ns


class Index(Replayed, Protocol):
    """One library's index over a pool of its own, driven as that library's scheduler drives it.

    Keys are tokens in the form that the library takes, made by `convert`, at the boundary.
    """

    watch: Stopwatch
    """Times the phases of `decode`, `admit`, `end_step` and `finish`."""

    def convert(self, tokens: Tokens) -> Any:
        """The key of `tokens`; not timed elsewhere."""

    def convert_list(self, tokens: list[int]) -> Any:
        """The same from a Python list, as a tokenizer may return it."""

    def query(self, key: Any) -> Any:
        """What `match` and `borrow` take; the time to make it belongs to the request."""

    def match(self, query: Any) -> int:
        """Look up all but the last token; returns how many were found."""

    def borrow(self, query: Any) -> int:
        """Look up, lock, read the pages or slots found, unlock; returns their number."""

    def store(self, key: Any) -> None:
        """Cache a sequence and leave it evictable, the quickest way."""

    def prepare_insert(self, key: Any, cached: int) -> Any:
        """All that comes before `insert`: `cached` tokens of `key` are cached already."""

    def insert(self, prepared: Any) -> None:
        """Put the new tokens of a prepared sequence into the index."""

    def after_insert(self, prepared: Any) -> None:
        """Leave them evictable."""

    def evict(self, num_tokens: int) -> None:
        """Free that many tokens' room, least recently used first."""

    def prefill_in_chunks(self, key: Any, chunk: int) -> None:
        """One request from look-up to release, prefilled `chunk` tokens at a time."""
