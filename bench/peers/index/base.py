"""The interface through which the benchmark drives an index."""

from __future__ import annotations

from typing import Any, Protocol

from radixcache.tokens import Tokens as Tokens


class Index(Protocol):
    """One library's index over a pool of its own, driven as that library's scheduler drives it.

    - `query` makes what `match` and `borrow` take: tokens in the form that the library takes.
    - `match` looks up all but the last token, and returns how many were found.
    - `borrow` looks up, locks, reads the pages or slots found, unlocks; returns their number.
    - `store` caches a sequence and leaves it evictable, the quickest way.
    - `evict` frees that many tokens' room, least recently used first.
    """

    def query(self, tokens: Tokens) -> Any: ...
    def match(self, query: Any) -> int: ...
    def borrow(self, query: Any) -> int: ...
    def store(self, tokens: Tokens) -> None: ...
    def evict(self, num_tokens: int) -> None: ...
