"""What the benchmark asks of an index, and how it takes the time."""

from __future__ import annotations

import time
from typing import Any, Protocol

from bench.peers.index.trace_t import Replayed, Tokens

clock = time.thread_time_ns


class Stopwatch:
    """Thread CPU time by phase, less what reading the clock costs.

    Each `lap` books the time since the last `start` or `lap`.
    """

    def __init__(self) -> None:
        self.ns: dict[str, float] = {}
        self.cost = 0.0
        """Nanoseconds that a lap of nothing takes."""
        laps = []
        for _ in range(50):
            self.start()
            for _ in range(100):
                self.lap("nothing")
            laps.append(self.take()["nothing"] / 100)
        self.cost = sorted(laps)[len(laps) // 2]

    def start(self) -> None:
        self._last = clock()

    def lap(self, phase: str) -> None:
        now = clock()
        self.ns[phase] = self.ns.get(phase, 0.0) + now - self._last - self.cost
        self._last = clock()

    def take(self) -> dict[str, float]:
        """The times so far, nanoseconds by phase; starts again from nothing."""
        ns, self.ns = self.ns, {}
        return ns


class Index(Replayed, Protocol):
    """One library's index over a pool of its own, driven as that library's scheduler drives it.

    - `convert` and `convert_list` make a key: tokens in the form that the library takes.
    - `query` makes what `match` and `borrow` take; the time to make it belongs to the request.
    - `match` looks up all but the last token, and returns how many were found.
    - `borrow` looks up, locks, reads the pages or slots found, unlocks; returns their number.
    - `store` caches a sequence and leaves it evictable, the quickest way.
    - `prepare_insert` does all that comes before `insert`: `cached` tokens are cached already;
      `insert` puts the new ones into the index; `after_insert` leaves them evictable.
    - `evict` frees that many tokens' room, least recently used first.
    - `prefill_in_chunks` is one request from look-up to release, `chunk` tokens at a time.
    - `watch` times the phases of `decode`, `admit`, `end_step` and `finish`.
    """

    watch: Stopwatch
    page_size: int
    texts: list[Tokens]

    def __init__(self, page_size: int, texts: list[Tokens]) -> None:
        self.watch, self.page_size, self.texts = Stopwatch(), page_size, texts

    def query(self, key: Any) -> Any:
        return key

    def after_insert(self, prepared: Any) -> None:
        pass

    def end_step(self) -> None:
        pass

    def convert(self, tokens: Tokens) -> Any: ...
    def convert_list(self, tokens: list[int]) -> Any: ...
    def match(self, query: Any) -> int: ...
    def borrow(self, query: Any) -> int: ...
    def store(self, key: Any) -> None: ...
    def prepare_insert(self, key: Any, cached: int) -> Any: ...
    def insert(self, prepared: Any) -> None: ...
    def evict(self, num_tokens: int) -> None: ...
    def prefill_in_chunks(self, key: Any, chunk: int) -> None: ...
