"""What a prefix cache must hold, in plain dictionaries and lists: one model for each of the three.

A prefix is named by one 64-bit hash of its namespace and all its tokens. The same number is what a
slot of the simulated KV memory holds, because the KV of a token depends on the whole prefix before
it: a slot is right exactly if it holds the name of the prefix that ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np
from numpy.typing import NDArray

from radixcache import (
    Cleared,
    Evicted,
    HashBlockCache,
    NoCache,
    PageCopy,
    PagePool,
    PrefixCache,
    RadixCache,
    Stored,
)
from radixcache.pages import Pages
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPage, StoredPages

NAMESPACES: tuple[Hashable, ...] = (None, "tenant")
SENTINEL = 1_000_000
"""A token that no test publishes: appended to a prefix, it lifts the cap of `match` off it."""

Event = tuple[str, Hashable, tuple[int, ...], int]
"""Its kind, the namespace, the whole prefix, and where the news in it begins."""


def names_of(namespace: Hashable, tokens: Iterable[int]) -> list[int]:
    """The names of all prefixes of `tokens`, shortest first."""
    name = 1 + NAMESPACES.index(namespace)  # not -1 and -2: their hashes are equal
    return [name := hash((name, int(token))) for token in tokens]


def as_event(event: Stored | Evicted | Cleared) -> Event:
    if isinstance(event, Cleared):
        return ("cleared", None, (), 0)
    kind = "stored" if isinstance(event, Stored) else "evicted"
    return (kind, event.namespace, tuple(event.tokens.tolist()), event.start)


class KV:
    """KV memory that holds names of prefixes, treated as a runtime treats its tensors."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.slots: NDArray[np.int64] = np.zeros((num_pages, page_size), dtype=np.int64)
        self._garbage = -(1 << 62)

    def garbage(self) -> int:
        """A value that no prefix has, new at each call."""
        self._garbage -= 1
        return self._garbage

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Read all sources, then write all targets, as one batched kernel would."""
        read = [self.slots[copy.source, : copy.num_slots].copy() for copy in copies]
        for copy, values in zip(copies, read, strict=True):
            self.slots[copy.target, : copy.num_slots] = values

    def read(self, page_table: NDArray[np.int32], num_tokens: int) -> list[int]:
        """What attention would read for positions [0, num_tokens)."""
        values: list[int] = self.slots[page_table].ravel()[:num_tokens].tolist()
        return values


class Store:
    """What a lower tier's store does with bytes, for names.

    Args:
        above: what has the pages that are saved.
        rng: some slots are written only at the next `settle`, or never; with None, all at once.
    """

    def __init__(self, above: KV | Store, rng: Random | None) -> None:
        self.above, self.rng = above, rng
        self.slots: dict[int, NDArray[np.int64]] = {}
        self.late: list[StoredPage] = []

    def fails(self) -> bool:
        return self.rng is not None and self.rng.random() < 0.2

    def save(self, pages: Pages, stored: StoredPages) -> None:
        for number, page in zip(pages, stored.pages(), strict=True):
            self.slots[page.slot] = self.above.slots[number].copy()
            self.late.append(page)
        if self.rng is None or self.rng.random() < 0.5:
            self.settle()

    def settle(self) -> None:
        for page in self.late:
            page.state = "lost" if self.fails() else "stored"
        self.late.clear()

    def clear(self) -> None:
        self.slots.clear()


def tiers_below(
    kv: KV, slots: Sequence[int], page_size: int, fails: bool
) -> tuple[list[LowerTier], list[Store]]:
    """Tiers of so many slots, one below the other, and their stores."""
    stores: list[Store] = []
    for _ in slots:
        stores.append(Store(stores[-1] if stores else kv, Random(0) if fails else None))
    tier = None
    for count, store in zip(reversed(slots), reversed(stores), strict=True):
        tier = LowerTier(count, page_size, store, below=tier)
    return [] if tier is None else [*tier.chain()], stores


@dataclass(eq=False)
class Request:
    """A live lease, or a pin, and what must be true of it."""

    namespace: Hashable
    prompt: list[int]
    tokens: list[int]
    """Its path: what was found, and what was published."""
    names: list[int]
    resumed: bool = False
    cached: int = 0
    back: int | None = None
    """Where a failed step takes it; None if nothing of it is in flight."""
    publishing: bool = False
    used: bool = False
    """It has published: it counts, and its release is a use."""
    copying: bool = False
    """Its half-filled page is right only when the step has run."""
    table: list[int] = field(default_factory=list)
    """In the block model its pages; of a pin, what it held at first."""
    queued: bool = True
    """In the block model: its pages are still in the free queue."""

    @property
    def written(self) -> int:
        """Positions of the path whose KV is there, whether or not the step runs."""
        return len(self.tokens) if self.back is None else self.back

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens = [*self.tokens, *tokens]
        self.names = names_of(self.namespace, self.tokens)

    def roll_back(self) -> None:
        assert self.back is not None
        self.tokens, self.names = self.tokens[: self.back], self.names[: self.back]
        self.cached = min(self.cached, self.back)
        self.copying = False


class Model:
    """Of `NoCache`: nothing is ever found, and every request has pages of its own."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.holds: list[Request] = []
        """Live requests and pins."""
        self.told: list[Event] = []
        """The events that must have come."""

    def cached(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """How many leading tokens are cached."""
        return 0

    def written(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """How many leading tokens are cached and not in flight."""
        return 0

    def hit(self, namespace: Hashable, tokens: Sequence[int], include_last: bool = False) -> int:
        """What `acquire` must find: of a page in flight all or nothing, and never the last token
        unless all is written and the caller can do with it."""
        if include_last and self.written(namespace, tokens) == len(tokens):
            return len(tokens)
        hit = self.cached(namespace, tokens[:-1])
        written = self.written(namespace, tokens[:-1])
        return hit if written >= hit else max(written, hit // self.page_size * self.page_size)

    def paths(self) -> list[tuple[Hashable, list[int]]]:
        """Prefixes that together are all that is cached."""
        return []

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def acquire(self, request: Request) -> None:
        self.holds.append(request)

    def fits(self, request: Request, wanted: int) -> bool | None:
        """Whether there are `wanted` more pages; None if that is for others to say."""
        return wanted <= self.num_pages - sum(len(hold.table) for hold in self.holds)

    def reserve(self, request: Request, wanted: int) -> None:
        request.table += [0] * wanted

    def follows_flight(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether written `tokens` are, or follow, what is in flight: then nothing is published."""
        return request.back is not None

    def publish(self, request: Request, start: int, written: bool) -> None:
        """`request.tokens` from `start` on are published."""

    def commit(self) -> None:
        """What is in flight is written."""

    def rollback(self, flight: list[Request]) -> None:
        """The step of these failed; called before their paths are cut."""
        for request in flight:
            del request.table[self.pages(request.written) :]

    def release(self, request: Request) -> None:
        self.holds.remove(request)

    def evict(self, count: int) -> int | None:
        """How many pages `evict(count)` says that it freed; None if that is for others to say."""
        return 0

    def reset(self) -> None:
        """All is forgotten."""
        self.told.append(("cleared", None, (), 0))


@dataclass
class Position:
    """One cached token, at the end of one prefix."""

    namespace: Hashable
    tokens: list[int]
    parent: int | None
    written: bool
    children: int = 0
    last_use: int = 0


class TreeModel(Model):
    """Of `RadixCache`: every cached prefix by name, and when it was used last.

    It does not know which pages there are, so it is told of evictions, and judges them: only the
    tails of leaves go, that nobody holds, in the order of their last use.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.positions: dict[int, Position] = {}
        self.clock = 0

    def _known(self, namespace: Hashable, tokens: Sequence[int]) -> Iterator[Position]:
        for name in names_of(namespace, tokens):
            if name not in self.positions:
                return
            yield self.positions[name]

    def cached(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        return len([*self._known(namespace, tokens)])

    def written(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        known = [position.written for position in self._known(namespace, tokens)]
        return known.index(False) if False in known else len(known)

    def paths(self) -> list[tuple[Hashable, list[int]]]:
        return [(p.namespace, p.tokens) for p in self.positions.values() if not p.children]

    def fits(self, request: Request, wanted: int) -> bool | None:
        return None

    def follows_flight(self, request: Request, tokens: Sequence[int]) -> bool:
        known = [*self._known(request.namespace, [*request.tokens, *tokens])]
        return request.back is not None or not all(position.written for position in known)

    def publish(self, request: Request, start: int, written: bool) -> None:
        names, tokens = request.names, request.tokens
        new = [at for at in range(start, len(names)) if names[at] not in self.positions]
        for at in new:
            parent = names[at - 1] if at else None
            if parent is not None:
                self.positions[parent].children += 1
            position = Position(request.namespace, tokens[: at + 1], parent, written)
            self.positions[names[at]] = position
        if new:
            self.told.append(("stored", request.namespace, tuple(tokens), new[0]))

    def commit(self) -> None:
        for position in self.positions.values():
            position.written = True

    def rollback(self, flight: list[Request]) -> None:
        """What is in flight goes by the events, see `forget`."""
        assert all(position.written for position in self.positions.values()), "still in flight"

    def release(self, request: Request) -> None:
        super().release(request)
        if request.used:
            self.note_use(request)

    def note_use(self, request: Request) -> None:
        self.clock += 1
        for name in request.names:
            self.positions[name].last_use = self.clock

    def evict(self, count: int) -> int | None:
        return None

    def reset(self) -> None:
        super().reset()
        self.positions.clear()

    def forget(self, namespace: Hashable, tokens: Sequence[int], start: int, failed: bool) -> None:
        """Positions [start, len(tokens)) go, because of pressure or of a failed step."""
        names = names_of(namespace, tokens)
        assert 0 <= start < len(names), "an event about no position at all"
        held = {name for hold in self.holds for name in hold.names}
        oldest = min(
            (
                position.last_use
                for name, position in self.positions.items()
                if name != names[-1] and self._stands_in_order(name, held)
            ),
            default=inf,
        )
        for name in reversed(names[start:]):
            position = self.positions.pop(name, None)
            assert position is not None, "evicted what was not cached"
            assert not position.children, "evicted what others build on"
            if position.parent is not None:
                self.positions[position.parent].children -= 1
            if failed:
                assert not position.written, "a failed step takes what was written before"
            else:
                assert name not in held, "evicted what a lease stands on"
                assert position.last_use <= oldest, "evicted before what was used longer ago"

    def _stands_in_order(self, name: int, held: set[int]) -> bool:
        """Whether it is a leaf that nobody holds. What follows the cursor of a lease without a
        fork may go in its turn, or later."""
        if self.positions[name].children or name in held:
            return False
        parent = self.positions[name].parent
        while parent is not None and self.positions[parent].children == 1:
            if parent in held:
                return False
            parent = self.positions[parent].parent
        return True


class BlockModel(Model):
    """Of `HashBlockCache`: what each page holds, and the queue in which pages wait to be used.

    vLLM's rules, and those for what vLLM does not have: leases that only look, failed steps, tokens
    published late, pins. A block is named by its namespace and all the tokens up to its end.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.queue = list(range(1, num_pages))  # page 0 is never used
        self.content: dict[int, tuple[Hashable, list[int]]] = {}
        """The block that each page is cached for, in order of publication."""
        self.fresh: list[int] = []
        """Pages whose block is in flight, in order of publication."""

    @property
    def free(self) -> list[int]:
        """What `reserve` may take, the next one first."""
        held = {page for hold in self.holds for page in hold.table}
        return [page for page in self.queue if page not in held]

    def find(self, namespace: Hashable, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix, of equal ones the first published."""
        pages: list[int] = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            block = (namespace, [*tokens[:end]])
            same = [page for page, cached in self.content.items() if cached == block]
            if not same:
                break
            pages.append(same[0])
        return pages

    def cached(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        return len(self.find(namespace, tokens)) * self.page_size

    def written(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        fresh = [page in self.fresh for page in self.find(namespace, tokens)]
        return (fresh.index(True) if True in fresh else len(fresh)) * self.page_size

    def paths(self) -> list[tuple[Hashable, list[int]]]:
        return [*self.content.values()]

    def acquire(self, request: Request) -> None:
        super().acquire(request)
        request.table = self.find(request.namespace, request.tokens)

    def fits(self, request: Request, wanted: int) -> bool | None:
        return wanted <= len(self.free)

    def reserve(self, request: Request, wanted: int) -> None:
        if wanted:
            self.use(request)
        for page in self.free[:wanted]:
            self.queue.remove(page)
            self._forget(page)
            request.table.append(page)

    def use(self, request: Request) -> None:
        """The pages of a look-up leave the queue."""
        request.queued = False
        self.queue = [page for page in self.queue if page not in request.table]

    def publish(self, request: Request, start: int, written: bool) -> None:
        before, after = start // self.page_size, len(request.tokens) // self.page_size
        for block in range(before, after):
            page, end = request.table[block], (block + 1) * self.page_size
            self.content[page] = (request.namespace, request.tokens[:end])
            if not written:
                self.fresh.append(page)
        if after > before:
            whole = tuple(request.tokens[: after * self.page_size])
            self.told.append(("stored", request.namespace, whole, before * self.page_size))

    def commit(self) -> None:
        self.fresh.clear()

    def rollback(self, flight: list[Request]) -> None:
        for page in reversed(self.fresh):
            self._forget(page)
        for request in reversed(flight):
            self._cut(request, self.pages(request.written))
        self.fresh.clear()

    def release(self, request: Request) -> None:
        self._cut(request, 0)
        super().release(request)

    def evict(self, count: int) -> int | None:
        cached = [page for page in self.free if page in self.content][:count]
        for page in cached:
            self._forget(page)
        return len(cached)

    def reset(self) -> None:
        super().reset()
        self.content.clear()

    def _cut(self, request: Request, keep: int) -> None:
        """The table ends after `keep` pages; the last page that nobody uses joins the queue first:
        one without a block at the head, one with a block at the tail."""
        gone = request.table[keep:][::-1]
        del request.table[keep:]
        if not request.queued:
            used = {page for hold in self.holds if not hold.queued for page in hold.table}
            idle = [page for page in gone if page not in used]
            head = [page for page in idle if page not in self.content]
            self.queue = [*head, *self.queue, *(page for page in idle if page in self.content)]

    def _forget(self, page: int) -> None:
        if page in self.content:
            namespace, tokens = self.content.pop(page)
            start = len(tokens) - self.page_size
            self.told.append(("evicted", namespace, tuple(tokens), start))


Kind = Callable[[PagePool], PrefixCache]
MODELS: dict[Kind, type[Model]] = {
    RadixCache: TreeModel,
    HashBlockCache: BlockModel,
    NoCache: Model,
}


ENDLESS = 10_000  # slots, which hold all that a test evicts
