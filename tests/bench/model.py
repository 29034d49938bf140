"""Slow, obvious caches with which the runtime's scheduler runs as with the real ones.

They share no code with the index: a prefix is a tuple of all its tokens, a page is a number in a
list. What each must do is written from the contract of its scheme, not from our implementation.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import nan
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

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def take_window_copies(self) -> list[Any]:
        return []

    def take_copies(self) -> list[Any]:
        return []


class BruteForce:
    """What the scheduler calls; subclasses say what it does."""

    hold: type[Hold] = Hold
    changes = nan
    """Who waits is tried in each step: this is never what it was."""

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

    def match(self, tokens: np.ndarray, namespace: Hashable = None) -> int:
        lease = self.hold()
        self.find(lease, tokens.tolist())
        return len(lease.tokens)

    def publish(self, lease: Hold, tokens: np.ndarray, *, written: bool = False) -> None:
        lease.used = True
        self.store(lease, tokens.tolist(), written)

    def release(self, lease: Hold, **hints: bool) -> None:
        self.leases.remove(lease)
        self.leave(lease)

    def commit(self) -> None:
        pass

    def find(self, lease: Any, tokens: list[int]) -> None:
        """Let `lease` hold what is cached of all but the last of `tokens`."""

    def reserve(self, lease: Any, num_tokens: int) -> None:
        raise NotImplementedError

    def store(self, lease: Any, tokens: list[int], written: bool) -> None:
        lease.tokens += tokens

    def leave(self, lease: Any) -> None:
        """It has let go of its pages."""


class BruteUnits(BruteForce):
    """A radix tree in units of `page_size` tokens, each in a page of its own, under exact LRU.

    Page size 1 is the token-exact tree. For larger pages it is the page-aligned one, where what
    does not fill a unit is nowhere but with its request.
    """

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size)
        self.units: dict[Prefix, int] = {}
        """The last use of each, by the prefix at whose end it is."""
        self.clock = 0

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
        del self.units[min(leaves, key=self.units.__getitem__)]

    def store(self, lease: Hold, tokens: list[int], written: bool) -> None:
        lease.tokens += tokens
        for prefix in self.prefixes(lease.tokens):
            self.units.setdefault(prefix, 0)

    def leave(self, lease: Hold) -> None:
        if lease.used:
            self.clock += 1
            for prefix in self.prefixes(lease.tokens):
                self.units[prefix] = self.clock


@dataclass(eq=False)
class NamedHold(Hold):
    """A request that may have named a prefix."""

    name: Prefix | None = None
    shared: int = 0


class BruteNamed(BruteForce):
    """Prefixes that are named, in advance or by the requests, in half of the memory."""

    hold = NamedHold

    def __init__(self, num_tokens, page_size, names, in_advance):
        super().__init__(num_tokens, page_size)
        cut = [tuple(name[: len(name) // page_size * page_size].tolist()) for name in names]
        self.names = [name for name in cut if name]
        self.in_advance = in_advance
        self.known: list[Prefix] = []
        self.taken: set[Prefix] = set()
        self.computed: set[Prefix] = set()
        self.step: list[NamedHold] = []
        if in_advance:
            for name in self.names:
                self.learn(name)
            self.taken = set(self.known)

    def learn(self, name):
        pages = sum(len(known) for known in [*self.known, name]) // self.page_size
        if name not in self.known and pages <= self.num_pages // 2:
            self.known.append(name)

    def find(self, lease, tokens):
        fitting = [n for n in self.names if n == tuple(tokens[: len(n)]) and len(n) < len(tokens)]
        if not fitting:
            return
        name = max(fitting, key=len)
        if not self.in_advance:
            self.learn(name)
        if name in self.known:
            lease.name = name
            if name in self.taken:
                lease.shared = len(name) // self.page_size
            if name in self.computed:
                lease.tokens = list(name)

    def reserve(self, lease, num_tokens):
        wanted = -(-num_tokens // self.page_size)
        first = False
        if lease.name is not None and not lease.shared and not lease.pages:
            lease.shared = len(lease.name) // self.page_size
            first = lease.name not in self.taken
            wanted = max(wanted, lease.shared)
        more = max(0, wanted - lease.shared - len(lease.pages))
        prefixes = sum(len(name) for name in self.taken) // self.page_size
        used = prefixes + sum(len(other.pages) for other in self.leases)
        if more + first * lease.shared > self.num_pages - used:
            lease.shared *= not first
            raise OutOfPages
        if first:
            self.taken.add(lease.name)
        lease.pages += [0] * more
        lease.capacity = (lease.shared + len(lease.pages)) * self.page_size

    def store(self, lease, tokens, written):
        lease.tokens += tokens
        if not written:
            self.step.append(lease)

    def commit(self):
        for lease in self.step:
            if lease.name is not None and len(lease.tokens) >= len(lease.name):
                self.computed.add(lease.name)
        self.step = []


@dataclass(eq=False)
class Block:
    """A block of memory: what it is hashed by, its users, and when it was used last."""

    page: int
    prefix: Prefix | None
    end: int
    last: int
    users: int = 0
    computed: bool = False


@dataclass(eq=False)
class BlockHold(Hold):
    """A request, its whole prompt and its blocks."""

    prompt: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    appends: bool = False


class BruteFirst(BruteForce):
    """vLLM 0.4.3: every block hashed when it is taken, the last one computed again."""

    hold = BlockHold

    def __init__(self, num_tokens, page_size):
        super().__init__(num_tokens, page_size)
        self.blocks: list[Block] = []
        self.now = 0
        self.step: list[BlockHold] = []
        self.copies = self.swaps = self.evicted = 0

    def at(self, prefix):
        return next((block for block in self.blocks if block.prefix == prefix), None)

    def find(self, lease, tokens):
        lease.prompt = tokens
        for end in range(self.page_size, len(tokens), self.page_size):
            block = self.at(tuple(tokens[:end]))
            if block is None or not block.computed:
                break
            block.users += 1
            lease.blocks.append(block)
            lease.tokens = tokens[:end]

    def match(self, tokens, namespace=None):
        lease = self.hold()
        self.find(lease, tokens.tolist())
        for block in lease.blocks:  # a look holds nothing
            block.users -= 1
        return len(lease.tokens)

    def free(self):
        return self.num_pages - sum(block.users > 0 for block in self.blocks)

    def take(self, prefix, end):
        block = self.at(prefix) if prefix is not None else None
        if block is None:
            page = len(self.blocks)
            if page == self.num_pages:
                idle = [block for block in self.blocks if not block.users]
                first = min(idle, key=lambda b: (b.last, -b.end, b.page))
                self.blocks.remove(first)
                page = first.page
                self.evicted += 1
            block = Block(page, prefix, end, self.now)
            self.blocks.append(block)
        block.users += 1
        return block

    def reserve(self, lease, num_tokens):
        size, prompt = self.page_size, lease.prompt
        have, blocks = len(lease.blocks), -(-len(prompt) // size)
        target = max(have, blocks, -(-num_tokens // size))
        half = len(prompt) // size
        appends = num_tokens > len(prompt) and len(prompt) % size and not lease.appends
        if have < blocks:
            alone = sum(block.users == 1 for block in lease.blocks)
            if target + bool(appends) > self.free() + alone:
                raise OutOfPages
        elif target - have + bool(appends and lease.blocks[half].users > 1) > self.free():
            raise OutOfPages
        for index in range(have, target):
            end = (index + 1) * size
            known = tuple(prompt[:end]) if index < blocks else None
            lease.blocks.append(self.take(known, end))
        if appends:
            lease.appends = True
            block = lease.blocks[half]
            if block.users == 1:
                block.prefix, block.computed = None, False
            else:
                lease.blocks[half] = self.take(None, block.end)
                block.users -= 1
                self.copies += 1
        lease.capacity = target * size
        if len(prompt) % size and not lease.appends:
            lease.capacity = len(prompt)

    def store(self, lease, tokens, written):
        size, before = self.page_size, max(len(lease.tokens), len(lease.prompt))
        lease.tokens += tokens
        for index in range(before // size, len(lease.tokens) // size):
            prefix = tuple(lease.tokens[: (index + 1) * size])
            same = self.at(prefix)
            if same is None:
                lease.blocks[index].prefix = prefix
            else:
                lease.blocks[index].users -= 1
                same.users += 1
                lease.blocks[index] = same
                self.swaps += 1
        if written:
            self.mark(lease)
        else:
            self.step.append(lease)

    def mark(self, lease):
        for block in lease.blocks[: max(0, len(lease.tokens) // self.page_size - 1)]:
            block.computed = True

    def commit(self):
        for lease in self.step:
            self.mark(lease)
        self.step = []
        self.now += 1

    def leave(self, lease):
        size, prompt = self.page_size, lease.prompt
        for index, block in enumerate(lease.blocks):
            if lease.used:
                block.last = self.now
            written = len(lease.tokens) >= min((index + 1) * size, len(prompt))
            if not written and block.users == 1:
                block.prefix, block.computed = None, False
            ends_prompt = index == len(prompt) // size
            if written and ends_prompt and block.prefix is None and self.at(tuple(prompt)) is None:
                block.prefix = tuple(prompt)
            block.users -= 1
