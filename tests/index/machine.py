"""A cache under test: each call is made on it and on its model, and everything compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest

from radixcache import CacheStats, Cleared, Evicted, HashBlockCache, PagePool, RadixCache, Stored
from radixcache.errors import LeaseError, OutOfPages, PinError
from tests.index.model import (
    ENDLESS,
    KV,
    MODELS,
    NAMESPACES,
    SENTINEL,
    BlockModel,
    Event,
    Kind,
    Request,
    TreeModel,
    as_event,
    names_of,
    tiers_below,
)


class Machine:
    """A cache, its model, and a KV memory that an engine would have.

    Args:
        counts: is told how often what happened.
        slots: of each tier below; with `ENDLESS` nothing is lost, else saves and loads may fail.
    """

    def __init__(
        self,
        kind: Kind,
        page_size: int,
        num_pages: int,
        budget: int | None = None,
        counts: Counter[str] | None = None,
        slots: tuple[int, ...] = (),
    ) -> None:
        self.kind, self.page_size = kind, page_size
        self.pool = PagePool(num_pages, page_size)
        self.cache = kind(self.pool)
        if budget is not None:
            self.cache.pins.budget = budget
        self.model = MODELS[kind](num_pages, page_size)
        self.kv = KV(num_pages, page_size)
        self.counts = Counter[str]() if counts is None else counts
        self.leases: dict[Request, Any] = {}
        self.pins: dict[tuple[Hashable, str], Request] = {}
        self.flight: list[Request] = []
        """Those that stand on what the step being scheduled writes, in order."""
        self.steps: dict[Request, tuple[int, int]] = {}
        """What the step writes, by positions."""
        self.stats = CacheStats()
        self.heard: list[Event] = []
        self.evictions: list[tuple[int, int]] = []
        """Of each eviction, pages that were free before, and pages that it touched."""
        self.failing = False
        self.cache.events.append(self.hear)
        self.gone: set[tuple[int, ...]] = set()  # evicted into a tier with a slot that nobody reads
        self.tiers, self.stores = tiers_below(self.kv, slots, page_size, ENDLESS not in slots)
        self.cache.lower = self.tiers[0] if slots else None

    # -- requests ------------------------------------------------------------------------------

    def look_up(self, namespace: Hashable, tokens: list[int]) -> None:
        """What is found, and what follows it: to its end, unless that is far."""
        assert self.cache.match(tokens, namespace) == self.model.hit(namespace, tokens)
        length = self.model.cached(namespace, tokens)
        assert self.cache.cached_length(tokens, namespace) == length
        if isinstance(self.cache, RadixCache):
            found, branches = self.cache.follow(tokens, namespace, 3)
            following = branches[0].tolist() if branches else []
            whole = [*tokens[:length], *following]
            assert found == length and self.model.cached(namespace, whole) == len(whole)
            longer = [path for other, path in self.model.paths() if other == namespace]
            ends = not any(path[: len(whole)] == whole != path for path in longer)
            assert len(following) == 3 or ends, "did not follow to the end"

    def acquire(
        self,
        namespace: Hashable,
        prompt: list[int],
        resumed: bool = False,
        include_last: bool = False,
        leave: bool = False,
    ) -> Request:
        """A lease on exactly the longest prefix that can be shared; nothing else changes."""
        include_last &= self.cache.full_prompt_hits
        hit = self.model.hit(namespace, prompt, include_last)
        refs, free = self.pool.refs.copy(), self.pool.num_free
        lease = self.cache.acquire(prompt, namespace, resumed=resumed, include_last=include_last)
        assert (lease.num_tokens, lease.cached_tokens) == (hit, hit)
        assert len(lease.page_table) == self.model.pages(hit)
        later = self.model.cached(namespace, prompt[:-1]) - hit
        assert lease.next_step_tokens == max(0, later)
        path = prompt[:hit]
        request = Request(namespace, prompt, path, names_of(namespace, path), resumed, hit)
        if leave:
            self.cache.release(lease)
            assert (self.pool.refs == refs).all() and self.pool.num_free == free
            return request
        written = self.model.written(namespace, path)
        if written < hit:
            request.back = written
            self.flight.append(request)
        self.model.acquire(request)
        self.leases[request] = lease
        self.counts["hits"] += bool(hit)
        self.counts["hits of the whole"] += hit == len(prompt)
        self.counts["hits in flight"] += written < hit
        return request

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Room for so many tokens; or `OutOfPages`, truly, and with nothing changed."""
        lease, cache, model = self.leases[request], self.cache, self.model
        table, num_free = lease.page_table.copy(), self.pool.num_free
        wanted = max(0, model.pages(num_tokens) - len(table))
        fits, before = model.fits(request, wanted), self.seen()
        evicted = cache.stats.evicted_pages
        try:
            cache.reserve(lease, num_tokens)
        except OutOfPages:
            assert not fits and self.seen() == before and not self.evictions
            self.counts["out of pages"] += 1
            if fits is None and not self.flight:
                copy = len(request.tokens) % self.page_size > 0
                assert self.pool.num_free + self.spare() < wanted + copy, "there is room"
            return False
        assert fits is not False
        model.reserve(request, wanted)
        assert len(lease.page_table) == len(table) + wanted
        copied = int((lease.page_table[: len(table)] != table).sum())
        assert copied <= 1, "more than the half-filled page is replaced"
        request.copying |= bool(copied)
        self.stats.copied_pages += copied
        self.counts["copies"] += copied
        if self.kind is RadixCache:
            freed = self.pool.num_free - num_free + wanted + copied
            evicted = cache.stats.evicted_pages - evicted
            assert 0 <= evicted <= freed  # the rest came free where two nodes became one
            self.stats.evicted_pages += evicted
        self.never_more_than(wanted + copied)
        return True

    def publish(
        self, request: Request, tokens: list[int], written: bool, loaded: bool = False
    ) -> None:
        lease, start = self.leases[request], len(request.tokens)
        if not tokens or not self.make_room(request, start + len(tokens)):
            return
        if written and request.copying:
            return  # its page is not there yet
        if request.publishing:
            with pytest.raises(LeaseError, match="once per step"):
                self.cache.publish(lease, tokens, written=written)
            return
        table = lease.page_table.copy()
        cache: Any = self.cache
        publish = cache.load if loaded else partial(cache.publish, written=written)
        if written and self.model.follows_flight(request, tokens):
            publish(lease, tokens)
            return
        if not request.used and not loaded:
            self.admit(request)
        if not written:
            if request.back is None:
                request.back = start
                self.flight.append(request)
            request.publishing = request.copying = True
            self.steps[request] = (start, start + len(tokens))
        request.extend(tokens)
        if written:
            self.write(request, start)
        self.model.publish(request, start, written)
        publish(lease, tokens)
        if loaded:
            assert isinstance(self.model, TreeModel)
            self.model.note_use(request)
            request.cached = len(request.tokens)
            self.stats.loaded_tokens += len(tokens)
        self.counts["tables repointed"] += bool((lease.page_table != table).any())
        self.counts["published as written"] += written

    def admit(self, request: Request) -> None:
        request.used = True
        if request.resumed:
            self.stats.resumed_query_tokens += len(request.prompt)
            self.stats.resumed_hit_tokens += request.cached
        else:
            self.stats.requests += 1
            self.stats.query_tokens += len(request.prompt)
            self.stats.hit_tokens += request.cached

    def publish_nothing(self, request: Request) -> None:
        """A hit of the whole prompt is used from now on; any other has something to publish."""
        whole = request.cached == len(request.prompt)
        if not whole:
            with pytest.raises(LeaseError):
                self.cache.touch(self.leases[request])
            return
        self.cache.touch(self.leases[request])
        if not request.used:
            self.admit(request)

    def load(self, request: Request) -> None:
        """What the first tier that goes on has of the prompt, in pages of the request's own."""
        if not self.tiers or request.namespace is not None or request in self.flight:
            return
        for store in self.stores:
            store.settle()
        start = len(request.tokens)
        tier, pages, end = self.tiers[0].search(np.array(request.prompt[:-1], np.int32), start)
        store = self.stores[self.tiers.index(tier)]
        first, last = start // self.page_size, -(-end // self.page_size)
        assert len(pages) == (last - first if end > start else 0)
        tier.begin_load(pages)
        loads = bool(pages) and request.tokens == request.prompt[:start]
        if pages and store.fails():
            pages[0].state, loads = "lost", False
        if loads := loads and self.make_room(request, end):
            loaded = np.concatenate([store.slots[page.slot] for page in pages])
            names = names_of(None, request.prompt)[first * self.page_size : end]
            assert loaded[: len(names)].tolist() == names
            self.publish(request, request.prompt[start:end], True, loaded=not request.used)
            self.counts[f"loads from tier {self.stores.index(store)}"] += 1
        tier.end_load(pages, loads * (len(request.tokens) - first * self.page_size))

    def find_evicted(self) -> None:
        """Tiers with room for all have all that was evicted, but what the pool has."""
        self.counts["pages in a second tier"] += any(map(len, self.tiers[1:]))
        for path in self.gone if ENDLESS in [tier.num_slots for tier in self.tiers] else ():
            end = self.model.written(None, path)
            for _ in path:
                end = self.tiers[0].search(np.array(path, np.int32), end)[2]
            assert end == len(path), "an evicted page is lost"

    def release(self, request: Request) -> bool:
        """The lease ends and content stays; refused while the step writes for it."""
        lease = self.leases[request]
        if request.publishing:
            with pytest.raises(LeaseError, match="in flight"):
                self.cache.release(lease)
            return False
        if request in self.flight:
            self.flight.remove(request)
        self.model.release(request)
        self.cache.release(lease)
        del self.leases[request]
        assert lease.released
        return True

    # -- steps ---------------------------------------------------------------------------------

    def write(self, request: Request, start: int) -> None:
        """The KV of the path from `start` on."""
        table = self.leases[request].page_table.tolist()
        for at in range(start, len(request.tokens)):
            self.kv.slots[table[at // self.page_size], at % self.page_size] = request.names[at]

    def copy(self, everybody: bool) -> None:
        """The page copies of those in the step, perhaps of the others too."""
        copies = []
        for request, lease in self.leases.items():
            if everybody or request.publishing:
                request.copying = request in self.flight
                copies += lease.take_copies()
        assert all(self.pool.refs[copy.target] for copy in copies), "a copy into a free page"
        self.kv.copy(copies)

    def scribble(self) -> None:
        """Pages that hold nothing: whoever reads one from now on must fail."""
        idle = self.pool.refs == 0
        if isinstance(self.model, BlockModel):
            idle[list(self.model.content)] = False
        self.kv.slots[idle] = self.kv.garbage()

    def step(self, everybody: bool) -> None:
        """Copies, writes, and then each lease that takes part reads its whole path."""
        self.copy(everybody)
        self.scribble()  # not before: a copy may read a page that was freed in this very step
        for request, (start, _) in self.steps.items():
            self.write(request, start)
        for request in self.flight:
            self.read(request, len(request.tokens))
        self.cache.commit()
        self.model.commit()
        self.end_step()

    def fail(self, copies: str) -> None:
        """The step dies half-way: garbage lies in the slots that it alone was to write."""
        if copies == "made":
            self.copy(everybody=True)
        if copies == "lost":
            for request in self.steps:
                self.leases[request].take_copies()
        for request, (start, end) in self.steps.items():
            table = self.leases[request].page_table.tolist()
            for at in range(start, end):
                slot = table[at // self.page_size], at % self.page_size
                if self.kv.slots[slot] != request.names[at]:
                    self.kv.slots[slot] = self.kv.garbage()
        self.failing = True
        self.cache.rollback()
        for tier in self.tiers:
            tier.recover([])
        self.failing = False
        self.counts["failed steps"] += bool(self.steps)
        self.model.rollback(self.flight)
        for request in self.flight:
            request.roll_back()
            lease = self.leases[request]
            assert len(lease.page_table) == self.model.pages(len(request.tokens))
            assert not lease.take_copies(), "copies survive a rollback"
        self.scribble()
        self.end_step()

    def end_step(self) -> None:
        for request in self.flight:
            request.back, request.publishing, request.copying = None, False, False
        self.flight.clear()
        self.steps.clear()
        for namespace, tokens in self.model.paths():
            names, asked = names_of(namespace, tokens), [*tokens, SENTINEL]
            hit = self.model.hit(namespace, asked)
            lease = self.cache.acquire(asked, namespace)
            assert lease.num_tokens == hit
            assert self.kv.read(lease.page_table, hit) == names[:hit], "cached KV is wrong"
            self.cache.release(lease)

    # -- the rest of the interface -------------------------------------------------------------

    def evict(self, count: int) -> None:
        """Exactly as many pages as asked, or all that nobody holds."""
        expected, free = self.model.evict(count), self.pool.num_free
        freed = self.cache.evict(count)
        if expected is None:
            self.stats.evicted_pages += freed
            assert self.pool.num_free == free + freed
            if freed < count and not self.flight:
                assert self.spare() == 0, "more could go"
        assert expected in (None, freed)
        self.never_more_than(free + count)

    def pin(self, name: str, namespace: Hashable, tokens: list[int]) -> None:
        """What is cached and written stays; within the budget, and the share of a namespace."""
        size = self.cache.granularity
        whole = tokens[: len(tokens) // size * size] if self.cache.caches else []
        may = len(whole) > 0 and self.model.written(namespace, whole) == len(whole)
        pages = self.table(namespace, whole) if may else []
        may &= (namespace, name) not in self.pins
        may &= len({*pages, *self.pinned(namespace)}) <= (self.cache.pins.budget + 1) // 2
        may &= len({*pages, *self.pinned(*NAMESPACES)}) <= self.cache.pins.budget
        if not may:
            self.counts["pins refused"] += 1
            before = self.seen()
            with pytest.raises(PinError):
                self.cache.pin(name, tokens, namespace)
            assert self.seen() == before
            return
        self.counts["pins"] += 1
        self.cache.pin(name, tokens, namespace)
        pin = Request(namespace, tokens, whole, names_of(namespace, whole), table=pages)
        self.model.holds.append(pin)
        if isinstance(self.model, BlockModel):
            self.model.use(pin)
        self.pins[namespace, name] = pin

    def unpin(self, name: str, namespace: Hashable) -> None:
        if (namespace, name) in self.pins:
            self.model.release(self.pins.pop((namespace, name)))
            self.cache.unpin(name, namespace)
        else:
            with pytest.raises(PinError):
                self.cache.unpin(name, namespace)

    def reset(self) -> None:
        """Everything is forgotten, unless a lease or a pin lives."""
        if self.model.holds:
            self.counts["resets refused"] += 1
            with pytest.raises(LeaseError):
                self.cache.reset()
        else:
            self.cache.reset()
            self.model.reset()
            self.gone.clear()
            self.stats = CacheStats()

    def let_go(self) -> None:
        """End the step, all requests and all pins."""
        self.step(everybody=False)
        for request in [*self.leases]:
            self.release(request)
        for namespace, name in [*self.pins]:
            self.unpin(name, namespace)

    def finish(self) -> None:
        """Without a lease every page can be had again."""
        self.let_go()
        self.evict(self.pool.num_pages)
        self.compare()
        unused = self.kind is HashBlockCache  # page 0
        assert self.pool.num_free == self.pool.num_pages - unused, "pages leaked"

    # -- what must be true ---------------------------------------------------------------------

    def hear(self, event: Stored | Evicted | Cleared) -> None:
        if not isinstance(event, Evicted):
            self.heard.append(as_event(event))
            return
        if not self.failing:
            first, last = event.start // self.page_size, (len(event.tokens) - 1) // self.page_size
            self.evictions.append((self.pool.num_free, last - first + 1))
            self.stats.evicted_tokens += len(event.tokens) - event.start
            self.stats.evicted_pages += self.kind is HashBlockCache
        if isinstance(self.model, TreeModel):
            tokens, tiers = event.tokens.tolist(), self.tiers[:1]
            self.model.forget(event.namespace, tokens, event.start, self.failing)
            takes = [t for t in tiers if sum(p.readers > 0 for p in t.in_order()) < t.num_slots]
            if takes and event.namespace is None and not self.failing:
                self.gone.add(tuple(tokens))
        else:
            self.heard.append(as_event(event))

    def never_more_than(self, num_free: int) -> None:
        """The tree was trimmed page by page, until so many were free."""
        for free, touched in self.evictions if self.kind is RadixCache else ():
            assert touched <= num_free - free, "more was evicted than was asked for"
        self.counts["evictions"] += len(self.evictions)
        self.evictions.clear()

    def table(self, namespace: Hashable, tokens: list[int]) -> list[int]:
        """The pages of a cached prefix."""
        lease = self.cache.acquire([*tokens, SENTINEL], namespace)
        pages: list[int] = lease.page_table.tolist()
        self.cache.release(lease)
        return pages

    def spare(self) -> int:
        """Pages that are in no lease's table, those included that a copy stands for."""
        held = {page for lease in self.leases.values() for page in lease.page_table.tolist()}
        for hold in self.model.holds:
            held |= {*self.table(hold.namespace, hold.tokens)}
        return self.pool.num_pages - self.pool.num_free - len(held)

    def seen(self) -> object:
        """What a call that is refused must leave alone."""
        leases = [(lease.num_tokens, lease.page_table.tolist()) for lease in self.leases.values()]
        return self.pool.refs.tolist(), leases, {**self.cache.pins}, vars(self.cache.stats).copy()

    def pinned(self, *namespaces: Hashable) -> set[int]:
        pins = [pin for (namespace, _), pin in self.pins.items() if namespace in namespaces]
        return {page for pin in pins for page in pin.table}

    def read(self, request: Request, num_tokens: int) -> None:
        read = self.kv.read(self.leases[request].page_table, num_tokens)
        assert read == request.names[:num_tokens], "a lease reads wrong KV"

    def compare(self) -> None:
        """All that can be seen, after each call."""
        cache, model, size = self.cache, self.model, self.page_size
        cache.check()
        self.find_evicted()
        assert self.heard == model.told
        self.heard.clear()
        model.told.clear()
        assert cache.stats == self.stats
        assert cache.idle == (not model.holds) and cache.in_flight == bool(self.flight)
        assert cache.pins == {key: len(pin.tokens) for key, pin in self.pins.items()}
        assert cache.pins.num_pages == len(self.pinned(*NAMESPACES))
        for namespace in NAMESPACES:
            assert cache.pins.num_pages_of(namespace) == len(self.pinned(namespace))
        for pin in self.pins.values():
            assert model.cached(pin.namespace, pin.tokens) == len(pin.tokens)
        held = self.pinned(*NAMESPACES)
        for request, lease in self.leases.items():
            assert lease.num_tokens == len(request.tokens) <= lease.capacity
            assert lease.cached_tokens == request.cached
            table = lease.page_table.tolist()
            held.update(table)
            if isinstance(model, BlockModel):
                assert table == request.table
            half = request.copying or request.back is not None
            self.read(request, request.written // size * size if half else request.written)
        assert self.pool.refs[sorted(held)].all() and cache.leased_pages == len(held)
        if isinstance(model, BlockModel):
            assert isinstance(cache, HashBlockCache) and cache.queue == model.queue
            assert self.pool.num_free == len(model.free)
            held_by = Counter([0, *(page for hold in model.holds for page in hold.table)])
            assert self.pool.refs.tolist() == [held_by[page] for page in range(model.num_pages)]
