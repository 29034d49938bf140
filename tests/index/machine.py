"""Drives a `RadixCache` the way a scheduler does, and judges every answer and every byte.

`Machine` owns the cache, the reference models and a simulated KV memory. Each method is one
operation: it makes the call, compares the outcome with the reference, and then verifies the whole
state. `test_stateful.py` lets hypothesis choose the operations, `stress.py` a seeded `Random`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random

import numpy as np
from numpy.typing import NDArray

from radixcache import (
    CacheStats,
    Lease,
    LeaseError,
    OutOfPages,
    PageCopy,
    PagePool,
    PinError,
    RadixCache,
)
from radixcache.base import as_tokens
from radixcache.events import Cleared, Evicted, Stored
from tests.index.reference import (
    SENTINEL,
    Chain,
    Reference,
    Replay,
    SimulatedKV,
    chain_of,
    extend,
    root,
)


@dataclass(eq=False)
class Request:
    """A live lease, and what a runtime knows about it."""

    lease: Lease
    namespace: Hashable
    prompt: list[int]
    tokens: list[int]
    """The path of the lease: what was found plus what was published."""
    chain: Chain
    resumed: bool
    settled: int
    """The length at the last commit, or the written part of the hit that opened the lease."""
    reserved: int = 0
    """Tokens that `reserve` made room for, if more than the path."""
    admitted: bool = False
    in_step: bool = False
    """It published or found something that the step being scheduled writes."""
    copying: int | None = None
    """First position of a page that the step must copy, or write as a whole, before it is read."""
    published: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of positions that the step being scheduled will write."""

    @property
    def to_compute(self) -> list[int]:
        """The tokens of the prompt that follow the path."""
        return self.prompt[len(self.tokens) :]

    @property
    def readable(self) -> int:
        """How many positions read right at any moment, not only after the step has run."""
        return self.settled if self.copying is None else min(self.settled, self.copying)


class Machine:
    """A cache under test: every operation is checked against the references and the KV memory."""

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        *,
        pin_budget: int | None = None,
        policy: str = "lru",
        check_every: int = 1,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.cache = RadixCache(self.pool, policy=policy)
        if pin_budget is not None:
            self.cache.pin_budget = pin_budget
        self.pin_budget = self.cache.pin_budget
        self.pin_share = (self.pin_budget + 1) // 2
        self.page_size = page_size
        self.reference = Reference(page_size)
        self.replay = Replay()
        self.kv = SimulatedKV(num_pages, page_size)
        self.requests: list[Request] = []
        self.pins: dict[tuple[Hashable, str], list[int]] = {}
        self.stats = CacheStats()
        self.copies_taken = 0
        self.counts: Counter[str] = Counter()
        self.check_every = check_every
        self._rolling_back = False
        self._free_at_evictions: list[int] = []
        self.cache.events.append(self._hear)
        self._settle()

    # ------------------------------------------------------------------ look-ups

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """A pure look-up finds what the reference holds."""
        hit = self.cache.match(tokens, namespace)
        expected = self.reference.match(chain_of(namespace, tokens))
        assert hit == expected, f"match({list(tokens)}) is {hit}, must be {expected}"
        self._follow(tokens, namespace)
        return hit

    def _follow(self, tokens: Sequence[int], namespace: Hashable) -> None:
        """What follows a prefix is cached, and ends only where nothing else follows."""
        length, branches = self.cache.follow(tokens, namespace, 3)
        following = branches[0] if branches else as_tokens([])
        assert length == self.cache.cached_length(tokens, namespace)
        assert length == self.reference.cached_length(chain_of(namespace, tokens))
        chain = chain_of(namespace, [*tokens[:length], *following.tolist()])
        assert self.reference.cached_length(chain) == len(chain), "followed what is not cached"
        end = chain[-1] if chain else root(namespace)
        assert len(following) <= 3
        if len(following) < 3:
            parents = {position.parent for position in self.reference.positions.values()}
            assert end not in parents, "did not follow to the end"

    def acquire(
        self,
        tokens: Sequence[int],
        namespace: Hashable = None,
        resumed: bool = False,
        include_last: bool = False,
    ) -> Request:
        """A lease on exactly the longest shareable prefix; nothing else changes."""
        self.counts["acquire"] += 1
        expected = self.match(tokens, namespace)
        if include_last and self.reference.written_length(chain_of(namespace, tokens)) == len(
            tokens
        ):
            expected = len(tokens)
            self.counts["whole hits"] += 1
            self.counts["whole hits in mid-page"] += bool(expected % self.page_size)
        free = self.pool.num_free
        lease = self.cache.acquire(
            np.asarray(tokens, dtype=np.int32),
            namespace,
            resumed=resumed,
            include_last=include_last,
        )
        assert lease.num_tokens == lease.cached_tokens == expected, "acquire differs from match"
        longest = self.reference.cached_length(chain_of(namespace, tokens[:-1]))
        assert lease.next_step_tokens == max(0, longest - expected), "what a step later would hit"
        assert len(lease.page_table) == self._pages(expected), "the table covers the hit"
        assert self.pool.num_free == free, "acquire takes or frees pages"
        assert lease.namespace == namespace and not lease.released
        self.counts["hits in mid-page"] += bool(expected % self.page_size)
        path = list(tokens[:expected])
        chain = chain_of(namespace, path)
        settled = self.reference.written_length(chain)
        request = Request(lease, namespace, list(tokens), path, chain, resumed, settled)
        if settled < expected:
            self.counts["hits in flight"] += 1
            self._joins_step(request)
        self.requests.append(request)
        self._settle()
        return request

    # ------------------------------------------------------------------ scheduling

    def may_go_on(self, request: Request) -> bool:
        """A lease publishes once a step."""
        return not request.published

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Room for `num_tokens`, or `OutOfPages` with nothing changed and nothing else possible."""
        self.counts["reserve"] += 1
        lease = request.lease
        old_table, free = lease.page_table.copy(), self.pool.num_free
        before = self._snapshot()
        self._free_at_evictions.clear()
        try:
            self.cache.reserve(lease, num_tokens)
        except OutOfPages:
            self.counts["out of pages"] += 1
            assert self._snapshot() == before, "OutOfPages changed something"
            self._justify_out_of_pages(request, num_tokens)
            self._settle()
            return False
        request.reserved = max(request.reserved, num_tokens)
        table = lease.page_table
        assert len(table) == max(len(old_table), self._pages(num_tokens)), "table of wrong length"
        replaced = int((table[: len(old_table)] != old_table).sum())
        taken = len(table) - len(old_table) + replaced
        freed = self.pool.num_free - free + taken
        assert freed >= 0, "pages vanished"
        self.counts["reserve evicts"] += bool(self._free_at_evictions)
        self._never_more_than(taken)
        assert replaced <= 1, "more than one page was replaced by a copy"
        if replaced:
            self.counts["copy on write"] += 1
            request.copying = lease.num_tokens // self.page_size * self.page_size
        evicted = self.cache.stats.evicted_pages - self.stats.evicted_pages
        assert 0 <= evicted <= freed, f"{freed} pages became free, {evicted} count as evicted"
        self.stats.evicted_pages += evicted  # the rest came free where two nodes became one
        self._settle()
        return True

    def publish(self, request: Request, tokens: Sequence[int]) -> None:
        """`tokens` belong to the step being scheduled; the table may move to older duplicates."""
        self.counts["publish"] += 1
        lease, start = request.lease, request.lease.num_tokens
        old_table = lease.page_table.copy()
        if not request.admitted:
            request.admitted = True
            self._admit(request)
        added = extend(self._last(request), tokens)
        request.tokens += tokens
        request.chain += added
        duplicates = sum(name in self.reference for name in added)
        self.counts["duplicates"] += duplicates
        self.reference.publish(request.namespace, request.chain, request.tokens, start)
        self.cache.publish(lease, np.asarray(tokens, dtype=np.int32))
        request.published.append((start, start + len(tokens)))
        self._joins_step(request)
        assert lease.num_tokens == start + len(tokens), "the cursor is not at the end"
        assert len(lease.page_table) == len(old_table), "publish changed the table's length"
        moved = np.flatnonzero(lease.page_table != old_table)
        assert duplicates or not len(moved), "the table moved although nothing was a duplicate"
        self.counts["tables repointed"] += bool(len(moved))
        self._settle()

    def publish_written(self, request: Request, tokens: Sequence[int]) -> None:
        """Tokens that were decoded into the lease's own pages are in the cache at once.

        Unless it holds the same ones in flight: then nothing is published.
        """
        if request.in_step or request.copying is not None:
            return  # the page has still to be copied
        self.counts["publish written"] += 1
        lease, start = request.lease, request.lease.num_tokens
        added = extend(self._last(request), tokens)
        table = lease.page_table.tolist()
        for at, name in enumerate(added, start):
            self.kv.slots[table[at // self.page_size], at % self.page_size] = name
        known = [*takewhile(self.reference.__contains__, added)]
        in_flight = not all(self.reference.positions[name].written for name in known)
        self.counts["written in flight"] += in_flight
        if not in_flight:
            if not request.admitted:
                request.admitted = True
                self._admit(request)
            request.tokens += tokens
            request.chain += added
            self.reference.publish(request.namespace, request.chain, request.tokens, start)
            for name in added:
                self.reference.positions[name].written = True
        self.cache.publish(lease, np.asarray(tokens, dtype=np.int32), written=True)
        assert lease.num_tokens == start + (0 if in_flight else len(tokens))
        if not in_flight:
            request.settled = lease.num_tokens
        self._settle()

    def publish_nothing(self, request: Request) -> None:
        """A hit of the whole prompt is used from now on; any other has something to publish."""
        self.counts["publish nothing"] += 1
        is_whole = request.lease.cached_tokens == len(request.prompt)
        before = self._snapshot()
        try:
            self.cache.publish(request.lease, [], written=True)
        except LeaseError:
            assert not is_whole or request.published, "a hit of the whole prompt is not to be used"
        else:
            assert is_whole, "a lease counts that has published nothing"
            if not request.admitted:
                request.admitted = True
                self._admit(request)
        assert self._snapshot() == before, "publishing nothing changed something"
        self._settle()

    def publish_unreserved(self, request: Request, extra: int) -> None:
        """More tokens than the table has room for are refused, and nothing changes."""
        self.counts["publish refused"] += 1
        room = len(request.lease.page_table) * self.page_size - request.lease.num_tokens
        before = self._snapshot()
        try:
            self.cache.publish(request.lease, [0] * (room + extra))
        except LeaseError:
            assert self._snapshot() == before, "a refused publish changed something"
            self._settle()
            return
        raise AssertionError("publish of more than was reserved is accepted")

    def run_step(self, chaos: int) -> None:
        """The step succeeds: copies, writes, every lease reads its whole path, commit."""
        self.counts["steps"] += 1
        rng = Random(chaos)
        self.kv.copy(self._take_copies(rng, bystanders=True))
        self._scribble()  # not before: a copy may read a page that was freed in this very step
        written: dict[tuple[int, int], int] = {}
        for request in self.requests:
            for page, slot, name in self._writes(request):
                other = written.setdefault((page, slot), name)
                assert other == name, f"two leases write slot {slot} of page {page}"
                self.kv.slots[page, slot] = name
        for request in self.requests:
            self._read(request, len(request.tokens) if request.in_step else request.readable)
        self.cache.commit()
        self.reference.commit()
        for request in self.requests:
            request.published.clear()
            if request.in_step:
                request.in_step, request.copying = False, None
            request.settled = request.lease.num_tokens
        self._settle()
        self.verify_content()

    def fail_step(self, chaos: int) -> None:
        """The step dies half-way: garbage lies in slots that it alone owned; then rollback."""
        self.counts["rollbacks"] += 1
        rng = Random(chaos)
        if rng.random() < 0.8:
            run = rng.random() < 0.7
            copies = self._take_copies(rng, bystanders=run)
            if run:
                self.kv.copy(copies)
        for request in self.requests:
            for page, slot, name in self._writes(request):
                if self.kv.slots[page, slot] != name and rng.random() < 0.7:
                    self.kv.slots[page, slot] = self.kv.garbage()
        self._rolling_back = True
        self.cache.rollback()
        self._rolling_back = False
        self.reference.rollback()
        self._scribble()
        for request in self.requests:
            self._moved_back(request)
        self._settle()
        self.verify_content()

    # ------------------------------------------------------------------ the rest of the interface

    def release(self, request: Request) -> bool:
        """The lease dies and content stays; refused while the lease has tokens in flight."""
        self.counts["release"] += 1
        written = self.reference.written_length(request.chain)
        own_in_flight = any(end > written for _, end in request.published)
        may_refuse = bool(request.published) or written < len(request.chain)
        before = self._snapshot()
        try:
            request.lease.priority = len(request.tokens) % 3
            self.cache.release(request.lease)
        except LeaseError:
            self.counts["release refused"] += 1
            assert may_refuse, "a lease with nothing in flight cannot be released"
            assert self._snapshot() == before, "a refused release changed something"
            self._settle()
            return False
        assert not own_in_flight, "a lease with tokens in flight was released"
        assert request.lease.released
        self.requests.remove(request)
        self._settle()
        return True

    def evict(self, num_pages: int) -> int:
        """Exactly as many pages as asked, or all that nobody holds."""
        self.counts["evict"] += 1
        free = self.pool.num_free
        self._free_at_evictions.clear()
        freed = self.cache.evict(num_pages)
        self._never_more_than(free + num_pages)
        assert self.pool.num_free == free + freed, "evict miscounts the freed pages"
        self.stats.evicted_pages += freed
        if freed < num_pages and not self.reference.in_flight():
            assert self._evictable() == 0, f"evict({num_pages}) freed {freed}, but more could go"
        self._settle()
        return freed

    def pin(self, name: str, tokens: Sequence[int], namespace: Hashable = None) -> bool:
        """A cached prefix stays until unpinned; refused if absent, named twice or over a limit."""
        self.counts["pin"] += 1
        chain = chain_of(namespace, tokens)
        written = self.reference.written_length(chain) == len(chain)
        before, pins = self._snapshot(), self.cache.pins
        try:
            self.cache.pin(name, tokens, namespace)
        except PinError:
            self.counts["pin refused"] += 1
            if (namespace, name) not in self.pins and written:
                paths = [(ns, t) for (ns, _), t in self.pins.items()] + [(namespace, list(tokens))]
                sizes = [(ns, len(self._path_pages(ns, t))) for ns, t in paths]
                own = sum(size for ns, size in sizes if ns == namespace)
                assert own > self.pin_share or sum(size for _, size in sizes) > self.pin_budget, (
                    "a pin within share and budget is refused"
                )
            assert self._snapshot() == before and self.cache.pins == pins
            self._settle()
            return False
        assert (namespace, name) not in self.pins, "a pin name was given twice"
        assert self.reference.cached_length(chain) == len(chain), "pinned what is not cached"
        self.pins[namespace, name] = list(tokens)
        tables = [(ns, self._table(ns, t)) for (ns, _), t in self.pins.items()] if written else []
        assert len({p for _, t in tables for p in t.tolist()}) <= self.pin_budget, "over the budget"
        mine = {p for ns, t in tables if ns == namespace for p in t.tolist()}
        assert len(mine) <= self.pin_share, "over the namespace's share"
        self._settle()
        return True

    def unpin(self, name: str, namespace: Hashable = None) -> None:
        """The pin goes if the namespace has one of that name, else `PinError`."""
        self.counts["unpin"] += 1
        try:
            self.cache.unpin(name, namespace)
        except PinError:
            assert (namespace, name) not in self.pins, "a known pin cannot be dropped"
        else:
            assert self.pins.pop((namespace, name), None) is not None, "an unknown pin was dropped"
        self._settle()

    def reset(self) -> bool:
        """Everything is forgotten, unless a lease or a pin lives."""
        self.counts["reset"] += 1
        before = self._snapshot()
        try:
            self.cache.reset()
        except LeaseError:
            assert self.requests or self.pins, "reset is refused although nobody holds anything"
            assert self._snapshot() == before, "a refused reset changed something"
            return False
        assert not self.requests and not self.pins, "reset while somebody holds pages"
        self.reference.positions.clear()
        self.stats = CacheStats()
        self.copies_taken = 0
        assert self.pool.num_free == self.pool.num_pages
        self._settle()
        return True

    def finish(self) -> None:
        """Let go of everything: no page may be lost."""
        self.run_step(0)
        for request in list(self.requests):
            assert self.release(request)
        for namespace, name in list(self.pins):
            self.unpin(name, namespace)
        self.verify_content()
        self.evict(self.pool.num_pages)
        assert self.pool.num_free == self.pool.num_pages, "pages leaked"
        assert not self.reference.positions, "content without pages"
        self.cache.reset()

    # ------------------------------------------------------------------ verification

    def verify_content(self) -> None:
        """Every cached prefix is found to its end, and what is written reads back right."""
        before, stats = self._snapshot(), self._cache_stats()
        for namespace, tokens in self.reference.longest_paths():
            hit = self.match([*tokens, SENTINEL], namespace)
            chain = chain_of(namespace, tokens)
            lease = self.cache.acquire([*tokens, SENTINEL], namespace)
            assert lease.num_tokens == hit
            written = min(hit, self.reference.written_length(chain))
            read = self.kv.read(lease.page_table, written)
            assert read == chain[:written], self._wrong(read, chain, tokens, lease.page_table)
            self.cache.release(lease)
        assert self._snapshot() == before and self._cache_stats() == stats, "look-ups change state"
        if not self.requests and not self.pins and not self.reference.in_flight():
            reachable = {
                page
                for namespace, tokens in self.reference.longest_paths()
                for page in self._path_pages(namespace, tokens)
            }
            used = self.pool.num_pages - self.pool.num_free
            assert used == len(reachable), f"{used} pages used, {len(reachable)} reachable"

    def _settle(self) -> None:
        """After every operation: invariants, events, statistics, counts and all live leases."""
        self.counts["operations"] += 1
        if self.counts["operations"] % self.check_every == 0:
            self.cache.check()
        refs = np.asarray(self.pool.refs)
        assert int((refs == 0).sum()) == self.pool.num_free, "free pages are those nobody holds"
        assert self.replay.names == self.reference.positions.keys(), "events tell another story"
        assert self._cache_stats() == self.stats, f"{self.cache.stats} must be {self.stats}"
        assert self.cache.stats.copied_pages >= self.copies_taken, "copies were not counted"
        assert self.cache.pins == {key: len(tokens) for key, tokens in self.pins.items()}
        for (namespace, _), tokens in self.pins.items():
            chain = chain_of(namespace, tokens)
            assert self.reference.cached_length(chain) == len(chain), "a pinned prefix was evicted"
        for request in self.requests:
            lease, length = request.lease, len(request.chain)
            assert lease.num_tokens == length, "the cursor moved by itself"
            cached = self.reference.cached_length(request.chain)
            assert cached == length, "a leased path was evicted"
            assert len(lease.page_table) >= self._pages(max(length, request.reserved))
            assert (refs[lease.page_table] > 0).all(), "a lease holds a free page"
            self._read(request, request.readable)

    def _scribble(self) -> None:
        self.kv.scribble(np.asarray(self.pool.refs) == 0)

    def _read(self, request: Request, num_tokens: int) -> None:
        table = request.lease.page_table
        read = self.kv.read(table, num_tokens)
        right = request.chain[:num_tokens]
        assert read == right, self._wrong(read, right, request.tokens, table)

    def _wrong(self, read: Chain, right: Chain, tokens: list[int], table: NDArray[np.int32]) -> str:
        at = [p for p, (a, b) in enumerate(zip(read, right, strict=False)) if a != b]
        return f"positions {at} of {tokens} through table {table.tolist()} read wrong KV"

    def _hear(self, event: Stored | Evicted | Cleared) -> None:
        self.replay(event)
        if isinstance(event, Evicted) and not self._rolling_back:
            self._free_at_evictions.append(self.pool.num_free)
            self.stats.evicted_tokens += len(event.tokens) - event.start
            self.reference.forget(chain_of(event.namespace, event.tokens), event.start)

    def _never_more_than(self, wanted: int) -> None:
        """Nothing was evicted once `wanted` pages were free.

        More may be free at the end: where a branch goes, the page that a copy shadowed goes too.
        """
        enough = [free for free in self._free_at_evictions if free >= wanted]
        assert not enough, f"evicted with {enough} pages free, {wanted} were wanted"

    def _admit(self, request: Request) -> None:
        if request.resumed:
            self.stats.resumed_query_tokens += len(request.prompt)
        else:
            self.stats.requests += 1
            self.stats.query_tokens += len(request.prompt)
        self._count_hit(request, request.lease.cached_tokens)

    def _count_hit(self, request: Request, tokens: int) -> None:
        if request.resumed:
            self.stats.resumed_hit_tokens += tokens
        else:
            self.stats.hit_tokens += tokens

    def _cache_stats(self) -> CacheStats:
        """The cache's counters, but for the copies, which are bounded instead."""
        return CacheStats(**{**vars(self.cache.stats), "copied_pages": 0})

    def _take_copies(self, rng: Random, *, bystanders: bool) -> list[PageCopy]:
        """The pending copies of the step's leases, perhaps of some others, in any order."""
        chosen = [r for r in self.requests if r.published or (bystanders and rng.random() < 0.5)]
        rng.shuffle(chosen)
        copies = []
        for request in chosen:
            request.copying = None
            taken = request.lease.take_copies()
            assert not request.lease.take_copies(), "copies are taken twice"
            for copy in taken:
                assert copy.source != copy.target and 0 < copy.num_slots < self.page_size
                assert self.pool.refs[copy.target], "a copy into a free page"
            copies += taken
        targets = [copy.target for copy in copies]
        assert len(targets) == len(set(targets)), "two copies into one page"
        self.copies_taken += len(copies)
        self.counts["copies"] += len(copies)
        return copies

    def _writes(self, request: Request) -> Iterable[tuple[int, int, int]]:
        """Page, slot and value of what the step writes for `request`."""
        table = request.lease.page_table.tolist()
        for start, end in request.published:
            for at in range(start, end):
                yield table[at // self.page_size], at % self.page_size, request.chain[at]

    def _joins_step(self, request: Request) -> None:
        """From now on its half-written page may be another's, which the step writes as a whole."""
        request.in_step = True
        boundary = request.settled // self.page_size * self.page_size
        request.copying = boundary if request.copying is None else min(request.copying, boundary)

    def _moved_back(self, request: Request) -> None:
        """A lease of the failed step is where its KV is written, and holds no page more."""
        lease = request.lease
        if not request.in_step:
            return
        written = self.reference.written_length(request.chain)
        first = request.published[0][0] if request.published else written
        least = min(written, max(request.settled, first if first <= written else 0))
        now = lease.num_tokens
        if request.published:
            assert least <= now <= written, f"rolled back to {now}, not to {least}..{written}"
        else:
            assert now == written, f"rolled back to {now}, not to {written}"
        assert len(lease.page_table) == self._pages(now), "reserved pages survive a rollback"
        assert not lease.take_copies(), "copies survive a rollback"
        del request.tokens[now:], request.chain[now:]
        request.published.clear()
        request.reserved = 0
        request.copying = None
        request.in_step = False
        request.settled = now

    def _justify_out_of_pages(self, request: Request, num_tokens: int) -> None:
        """`OutOfPages` is true: what is free and what nobody holds is less than is needed."""
        if self.reference.in_flight():
            return
        lease = request.lease
        needed = self._pages(num_tokens) - len(lease.page_table)
        may_copy = bool(lease.num_tokens % self.page_size)
        available = self.pool.num_free + self._evictable()
        assert available < needed + may_copy, f"{available} pages for {needed}, yet OutOfPages"

    def _evictable(self) -> int:
        """Pages that no live lease, no leased path and no pin holds; nothing is in flight."""
        held: set[int] = set()
        for request in self.requests:
            held.update(request.lease.page_table.tolist())
            held |= self._path_pages(request.namespace, request.tokens)
        for (namespace, _), tokens in self.pins.items():
            held |= self._path_pages(namespace, tokens)
        return self.pool.num_pages - self.pool.num_free - len(held)

    def _path_pages(self, namespace: Hashable, tokens: list[int]) -> set[int]:
        """Every page of a path, those included that a deeper copy shadows."""
        return {
            int(self._table(namespace, tokens[:length])[-1]) for length in range(1, len(tokens) + 1)
        }

    def _table(self, namespace: Hashable, tokens: Sequence[int]) -> NDArray[np.int32]:
        lease = self.cache.acquire([*tokens, SENTINEL], namespace)
        table = lease.page_table.copy()
        self.cache.release(lease)
        return table

    def _snapshot(self) -> object:
        """What a refused call must leave as it was."""
        return (
            self.pool.num_free,
            (np.asarray(self.pool.refs) > 0).tolist(),
            [(r.lease.num_tokens, r.lease.page_table.tolist()) for r in self.requests],
            frozenset(self.replay.names),
        )

    def _last(self, request: Request) -> int:
        return request.chain[-1] if request.chain else root(request.namespace)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
