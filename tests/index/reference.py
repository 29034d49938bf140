"""Slow, obvious models of what a token-exact prefix cache must do.

A prefix is named by one 64-bit hash of its namespace and all its tokens. The same number is what a
simulated KV slot holds, because the KV of a token depends on the whole prefix before it: a slot is
right exactly if it holds the hash of the prefix that ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache import PageCopy
from radixcache.events import Cleared, Evicted, Stored

NAMESPACES: tuple[Hashable, ...] = (None, "tenant")
SENTINEL = 1_000_000
"""A token that no test publishes: appended to a prefix, it lifts the cap of `match` off it."""

Chain = list[int]
"""chain[i] names the prefix of i + 1 tokens."""


def root(namespace: Hashable) -> int:
    """The name of the empty prefix of `namespace`."""
    return 1 + NAMESPACES.index(namespace)  # not -1 and -2: their hashes are equal


def extend(name: int, tokens: Iterable[int]) -> Chain:
    """The names of the prefixes that follow `name` along `tokens`."""
    chain = []
    for token in tokens:
        name = hash((name, int(token)))
        chain.append(name)
    return chain


def chain_of(namespace: Hashable, tokens: Iterable[int]) -> Chain:
    """The names of all prefixes of `tokens`, shortest first."""
    return extend(root(namespace), tokens)


@dataclass
class Position:
    """One cached token, at the end of one prefix."""

    parent: int
    token: int
    children: int = 0
    written: bool = False


@dataclass
class Reference:
    """Every cached prefix by name, and whether its KV is written or in flight.

    It cannot know which pages an eviction trims, so it is told by `forget`; it does know that only
    tails may go, and what a look-up must then find.
    """

    page_size: int
    positions: dict[int, Position] = field(default_factory=dict)

    def __contains__(self, name: int) -> bool:
        return name in self.positions

    def publish(self, namespace: Hashable, chain: Chain, tokens: Sequence[int], start: int) -> None:
        """Positions [start, len(chain)) are published; those not cached yet are now in flight."""
        for at in range(start, len(chain)):
            if chain[at] in self.positions:
                continue
            parent = chain[at - 1] if at else root(namespace)
            if at:
                self.positions[parent].children += 1
            self.positions[chain[at]] = Position(parent, int(tokens[at]))

    def forget(self, chain: Chain, start: int) -> None:
        """Positions [start, len(chain)) are gone; they must have been the tail of a leaf."""
        for name in reversed(chain[start:]):
            position = self.positions.get(name)
            assert position is not None, "evicted a position that was not cached"
            assert position.children == 0, "evicted a position that others build on"
            self._drop(name)

    def commit(self) -> None:
        """What was in flight is written."""
        for position in self.positions.values():
            position.written = True

    def rollback(self) -> None:
        """What was in flight is gone."""
        for name in reversed([n for n, p in self.positions.items() if not p.written]):
            self._drop(name)

    def written_length(self, chain: Chain) -> int:
        """How many leading positions of `chain` are cached and written."""
        for at, name in enumerate(chain):
            position = self.positions.get(name)
            if position is None or not position.written:
                return at
        return len(chain)

    def cached_length(self, chain: Chain) -> int:
        """How many leading positions of `chain` are cached, written or in flight."""
        for at, name in enumerate(chain):
            if name not in self.positions:
                return at
        return len(chain)

    def match(self, chain: Chain) -> int:
        """What `PrefixCache.match` must answer for the tokens of `chain`."""
        hit = min(self.cached_length(chain), len(chain) - 1)
        written = self.written_length(chain[:hit])
        return hit if written == hit else max(written, hit // self.page_size * self.page_size)

    def in_flight(self) -> bool:
        """Whether anything is published but not yet written."""
        return any(not position.written for position in self.positions.values())

    def longest_paths(self) -> list[tuple[Hashable, list[int]]]:
        """Namespace and tokens of every cached prefix that nothing cached extends."""
        roots = {root(namespace): namespace for namespace in NAMESPACES}
        paths = []
        for name, position in self.positions.items():
            if position.children:
                continue
            tokens = []
            while name not in roots:
                tokens.append(self.positions[name].token)
                name = self.positions[name].parent
            paths.append((roots[name], tokens[::-1]))
        return paths

    def _drop(self, name: int) -> None:
        parent = self.positions.pop(name).parent
        if parent in self.positions:
            self.positions[parent].children -= 1


@dataclass
class Replay:
    """The content of a cache as somebody who only hears its events believes it to be."""

    names: set[int] = field(default_factory=set)

    def __call__(self, event: Stored | Evicted | Cleared) -> None:
        if isinstance(event, Cleared):
            self.names.clear()
            return
        chain = chain_of(event.namespace, event.tokens)
        assert 0 <= event.start < len(chain), "an event about no position at all"
        assert event.start == 0 or chain[event.start - 1] in self.names, "an event about an orphan"
        changed = set(chain[event.start :])
        if isinstance(event, Stored):
            assert not changed & self.names, "stored what was cached already"
            self.names |= changed
        else:
            assert changed <= self.names, "evicted what was not cached"
            self.names -= changed


class SimulatedKV:
    """KV memory that holds prefix names, treated as a runtime treats its tensors."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.slots: NDArray[np.int64] = np.zeros((num_pages, page_size), dtype=np.int64)
        self._garbage = 0

    def garbage(self) -> int:
        """A value that no prefix has, new at each call."""
        self._garbage += 1
        return -(1 << 62) - self._garbage

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Read all sources, then write all targets, as one batched kernel would."""
        read = [self.slots[copy.source, : copy.num_slots].copy() for copy in copies]
        for copy, values in zip(copies, read, strict=True):
            self.slots[copy.target, : copy.num_slots] = values

    def scribble(self, free: NDArray[np.bool_]) -> None:
        """Free pages hold nothing: whoever reads one from now on must fail."""
        self.slots[free] = self.garbage()

    def read(self, page_table: NDArray[np.int32], num_tokens: int) -> Chain:
        """What attention would read for positions [0, num_tokens)."""
        values: Chain = self.slots[page_table].ravel()[:num_tokens].tolist()
        return values


@dataclass
class Use:
    """A position in `ExactEviction`: how it was used, and how many cached positions follow it.

    Its names are those of a node of the tree, so that a policy can read it, too.
    """

    parent: int
    last_use: int
    created: int
    uses: int = 0
    priority: float = -inf
    children: int = 0


@dataclass
class Holder:
    """A lease of `ExactEviction`, in units; `created` when it first stored one."""

    chain: Chain
    cursor: int
    capacity: int
    created: int = 0


class ExactEviction:
    """A policy, to the unit: every cached unit of every path has uses, age and priority of its own.

    A unit is what fits one page: a token at page size 1, or a whole page of tokens if sequences
    only ever differ in whole pages. An eviction takes the leaf unit with the smallest key that no
    lease holds, one at a time.
    """

    def __init__(self, num_units: int, policy: Callable[[Any], Any]) -> None:
        self.num_units = num_units
        self.policy = policy
        self.units: dict[int, Use] = {}
        self.holders: list[Holder] = []
        self.clock = 0

    def acquire(self, chain: Chain, longest: int) -> Holder:
        """Hold the longest cached prefix of `chain`, at most `longest` units."""
        hit = 0
        while hit < longest and chain[hit] in self.units:
            hit += 1
        holder = Holder(chain, hit, hit)
        self.holders.append(holder)
        return holder

    def reserve(self, holder: Holder, num_units: int) -> bool:
        """Make room, evicting exactly what is short; False, and nothing changed, if impossible."""
        short = num_units - holder.capacity - self.num_free
        held = self._held()
        if short > len(self.units) - len(held):
            return False
        for _ in range(short):
            leaf = min(
                (name for name, use in self.units.items() if not use.children and name not in held),
                key=lambda name: self.policy(self.units[name]),
            )
            self._drop(leaf)
        holder.capacity = max(holder.capacity, num_units)
        return True

    def publish(self, holder: Holder, chain: Chain) -> None:
        """The path of `holder` is now `chain`; the first publish uses it."""
        self.clock += 1
        for at in range(holder.cursor, len(chain)):
            if chain[at] not in self.units:
                parent = chain[at - 1] if at else 0
                if at:
                    self.units[parent].children += 1
                holder.created = holder.created or self.clock
                self.units[chain[at]] = Use(parent, self.clock, holder.created)
        holder.chain, holder.cursor = chain, len(chain)

    def release(self, holder: Holder, priority: float = 0) -> None:
        """The path of `holder` is used for the last time and no longer held."""
        self.clock += 1
        for name in holder.chain[: holder.cursor]:
            unit = self.units[name]
            unit.last_use = self.clock
            unit.uses += 1
            unit.priority = max(unit.priority, priority)
        self.holders = [other for other in self.holders if other is not holder]

    @property
    def num_free(self) -> int:
        """Units that are neither cached nor reserved."""
        reserved = sum(holder.capacity - holder.cursor for holder in self.holders)
        return self.num_units - len(self.units) - reserved

    def _held(self) -> set[int]:
        return {name for holder in self.holders for name in holder.chain[: holder.cursor]}

    def _drop(self, name: int) -> None:
        parent = self.units.pop(name).parent
        if parent in self.units:
            self.units[parent].children -= 1
