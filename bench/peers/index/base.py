"""The interface through which the benchmark drives an index."""

from __future__ import annotations

from typing import Any, Protocol

from bench.peers.index.trace_t import Replayed, Tokens
from radixcache.bench.machine import Stopwatch


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
