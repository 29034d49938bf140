"""Slow, obvious caches with which the runtime's scheduler runs as with the real ones.

They share no code with the index: a prefix is a tuple of all its tokens, a page is a number in a
list. What each must do is written from the contract of its scheme, not from our implementation.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from radixcache import OutOfPages

Prefix = tuple[int, ...]


class Room(NamedTuple):
    """The size of a pool."""

    num_pages: int
    page_size: int


@dataclass(eq=False)
class Hold:
    """A request's lease: `tokens` are those whose KV is there, `pages` where."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    next_step_tokens: int = 0
    capacity: int = 0
    used: bool = False
    own_from: int = 0
    """Tokens before this one are not this lease's to write."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def take_copies(self) -> list[Any]:
        return []


class BruteForce:
    """What the scheduler calls; subclasses say what it does."""

    hold: type[Hold] = Hold

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self.pool = Room(self.num_pages, page_size)
        self.leases: list[Hold] = []

    def acquire(
        self,
        tokens: np.ndarray,
        namespace: Hashable = None,
        *,
        resumed: bool = False,
        include_last: bool = False,
    ) -> Hold:
        lease = self.hold()
        self.leases.append(lease)
        self.find(lease, tokens.tolist())
        lease.cached_tokens = len(lease.tokens)
        lease.capacity = max(lease.capacity, len(lease.tokens))
        return lease

    def publish(self, lease: Hold, tokens: np.ndarray, *, written: bool = False) -> None:
        lease.used = True
        self.store(lease, tokens.tolist(), written)

    def release(self, lease: Hold) -> None:
        self.leases.remove(lease)
        self.leave(lease)

    def commit(self) -> None:
        pass

    def find(self, lease: Hold, tokens: list[int]) -> None:
        """Let `lease` hold what is cached of all but the last of `tokens`."""

    def reserve(self, lease: Hold, num_tokens: int) -> None:
        raise NotImplementedError

    def store(self, lease: Hold, tokens: list[int], written: bool) -> None:
        raise NotImplementedError

    def leave(self, lease: Hold) -> None:
        raise NotImplementedError


class BruteNone(BruteForce):
    """Every request has its own pages."""

    def reserve(self, lease: Hold, num_tokens: int) -> None:
        wanted = -(-num_tokens // self.page_size)
        others = sum(len(other.pages) for other in self.leases if other is not lease)
        if wanted > self.num_pages - others:
            raise OutOfPages
        if wanted > len(lease.pages):
            lease.pages = [0] * wanted
            lease.capacity = wanted * self.page_size

    def store(self, lease: Hold, tokens: list[int], written: bool) -> None:
        lease.tokens += tokens

    def leave(self, lease: Hold) -> None:
        pass


class BruteHashBlock(BruteForce):
    """vLLM: whole blocks found by their prefix, and one line of pages that nobody uses."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size)
        self.line = list(range(1, self.num_pages))  # page 0 is never used
        self.blocks: dict[int, Prefix] = {}
        """What each page is cached for; in order of publication, so the first is found."""

    def find(self, lease: Hold, tokens: list[int]) -> None:
        size = self.page_size
        for end in range(size, len(tokens), size):
            prefix = tuple(tokens[:end])
            page = next((page for page, held in self.blocks.items() if held == prefix), None)
            if page is None:
                return
            lease.pages.append(page)
            lease.tokens = tokens[:end]

    def reserve(self, lease: Hold, num_tokens: int) -> None:
        wanted = -(-num_tokens // self.page_size) - len(lease.pages)
        line = [page for page in self.line if page not in lease.pages]
        if wanted > len(line):
            raise OutOfPages
        if wanted > 0:
            for page in line[:wanted]:
                self.blocks.pop(page, None)
            lease.pages += line[:wanted]
            self.line = line[wanted:]
            lease.capacity = len(lease.pages) * self.page_size

    def store(self, lease: Hold, tokens: list[int], written: bool) -> None:
        size, before = self.page_size, len(lease.tokens) // self.page_size
        lease.tokens += tokens
        for index in range(before, len(lease.tokens) // size):
            self.blocks[lease.pages[index]] = tuple(lease.tokens[: (index + 1) * size])

    def leave(self, lease: Hold) -> None:
        if not lease.used:
            return
        for page in reversed(lease.pages):
            if any(page in other.pages for other in self.leases):
                continue
            if page in self.blocks:
                self.line.append(page)
            else:
                self.line.insert(0, page)


@dataclass
class Unit:
    """A cached unit, at the end of the prefix that names it."""

    last_use: int


class BruteUnits(BruteForce):
    """A radix tree in units of `page_size` tokens, each in a page of its own, under exact LRU.

    Page size 1 is the token-exact tree. For larger pages it is the page-aligned one, where what
    does not fill a unit is nowhere but with its request.
    """

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size)
        self.units: dict[Prefix, Unit] = {}
        self.clock = 0
        self.evicted = 0

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        size = self.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def find(self, lease: Hold, tokens: list[int]) -> None:
        for prefix in self.prefixes(tokens[:-1]):
            if prefix not in self.units:
                return
            lease.tokens = list(prefix)

    @property
    def num_free(self) -> int:
        own = sum(
            -(-lease.capacity // self.page_size) - len(lease.tokens) // self.page_size
            for lease in self.leases
        )
        return self.num_pages - len(self.units) - own

    def held(self) -> set[Prefix]:
        return {prefix for lease in self.leases for prefix in self.prefixes(lease.tokens)}

    def reserve(self, lease: Hold, num_tokens: int) -> None:
        size = self.page_size
        short = -(-num_tokens // size) - lease.capacity // size - self.num_free
        held = self.held()
        if short > len(self.units) - len(held):
            raise OutOfPages
        for _ in range(short):
            self.evict_one(held)
        lease.capacity = max(lease.capacity, -(-num_tokens // size) * size)

    def evict_one(self, held: set[Prefix]) -> None:
        inner = {prefix[: -self.page_size] for prefix in self.units}
        leaves = [prefix for prefix in self.units if prefix not in inner and prefix not in held]
        del self.units[min(leaves, key=lambda prefix: self.units[prefix].last_use)]
        self.evicted += 1

    def store(self, lease: Hold, tokens: list[int], written: bool) -> None:
        lease.tokens += tokens
        for prefix in self.prefixes(lease.tokens):
            self.units.setdefault(prefix, Unit(0))

    def leave(self, lease: Hold) -> None:
        if lease.used:
            self.clock += 1
            for prefix in self.prefixes(lease.tokens):
                self.units[prefix].last_use = self.clock


class BruteTokens(BruteForce):
    """A token-exact tree over pages in memory without end: every token stays.

    A hit may end anywhere, but only a whole page of what the step being scheduled will write can
    be shared: a copy of a part of it would run too early. A step later all of it can be.
    """

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size)
        self.written: dict[Prefix, bool] = {}

    def find(self, lease: Hold, tokens: list[int]) -> None:
        length = done = 0
        while length < len(tokens) - 1 and tuple(tokens[: length + 1]) in self.written:
            length += 1
            if done == length - 1 and self.written[tuple(tokens[:length])]:
                done = length
        usable = length if done == length else max(done, length - length % self.page_size)
        lease.tokens = tokens[:usable]
        lease.next_step_tokens = length - usable

    def reserve(self, lease: Hold, num_tokens: int) -> None:
        lease.capacity = max(lease.capacity, num_tokens)

    def store(self, lease: Hold, tokens: list[int], written: bool) -> None:
        for token in tokens:
            lease.tokens.append(token)
            self.written.setdefault(tuple(lease.tokens), written)

    def leave(self, lease: Hold) -> None:
        pass

    def commit(self) -> None:
        self.written = dict.fromkeys(self.written, True)
