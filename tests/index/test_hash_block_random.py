"""Random schedules over `HashBlockCache`: every byte right, every page accounted for.

Which pages and in what order is compared with vLLM itself by `bench/peers/conformance`; here is
what vLLM does not have (steps that fail, leases that only look, pins, tokens published late) and
what a comparison of numbers does not show: that each page holds the KV that its readers expect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from radixcache import HashBlockCache, LeaseError, OutOfPages, PagePool, PinError
from radixcache.hash_block import BlockLease
from tests.index.reference import NAMESPACES, SENTINEL, Chain, SimulatedKV, chain_of


@dataclass(eq=False)
class Request:
    """A live lease and what its path should read."""

    lease: BlockLease
    namespace: Hashable
    prompt: list[int]
    tokens: list[int]
    chain: Chain
    written: int
    """Tokens whose KV is there already, not only once the step has run."""
    published: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of positions that the step being scheduled writes."""
    in_step: bool = False


class Schedule:
    """An erratic scheduler over one cache; everything is verified after each operation."""

    def __init__(self, seed: int, page_size: int, num_pages: int) -> None:
        self.rng = Random(f"{seed}/{page_size}/{num_pages}")
        self.cache = HashBlockCache(PagePool(num_pages, page_size))
        self.page_size = page_size
        self.kv = SimulatedKV(num_pages, page_size)
        self.requests: list[Request] = []
        self.pins: dict[tuple[Hashable, str], list[int]] = {}
        self.past: list[tuple[Hashable, list[int]]] = [(None, [])]
        self.alphabet = self.rng.choice([1, 2, 3])
        self.longest = max(3, min(60, page_size * num_pages * 2 // 3))
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        choices = {
            self.acquire: 24,
            self.publish: 30,
            self.publish_late: 12,
            self.run_step: 7,
            self.fail_step: 4,
            self.release: 12,
            self.evict: 2,
            self.pin: 2,
            self.unpin: 2,
            self.reset: 1,
        }
        for _ in range(operations):
            operation = self.rng.choices(list(choices), list(choices.values()))[0]
            operation()
            self.verify()
        self.run_step()
        while self.requests:
            self.release()
        while self.pins:
            self.unpin()
        self.cache.evict(self.cache.pool.num_pages)
        self.verify()
        assert self.cache.pool.num_free == self.cache.pool.num_pages - 1, "pages leaked"
        assert not self.cached()
        self.cache.reset()

    # ------------------------------------------------------------------ operations

    def acquire(self) -> None:
        if len(self.requests) >= 6:
            return
        namespace, known = self.rng.choice(self.past[-12:])
        prompt = known[: self.rng.choice([len(known), len(known), self.rng.randint(0, len(known))])]
        prompt = (prompt + self.some(self.rng.randint(1, 2 * self.page_size)))[: self.longest]
        expected = self.expected_hit(prompt, namespace)
        assert self.cache.match(prompt, namespace) == expected
        whole = self.expected_hit([*prompt, SENTINEL], namespace)
        assert self.cache.cached_length(prompt, namespace) == whole
        queue, free = self.cache.queue, self.cache.pool.num_free
        unheld = (self.cache.pool.refs == 0).copy()
        lease = self.cache.acquire(prompt, namespace)
        assert lease.cached_tokens == lease.num_tokens == expected
        assert self.cache.queue == queue
        assert self.cache.pool.num_free == free - int(unheld[lease.page_table].sum())
        if self.rng.random() < 0.2:
            self.cache.release(lease)
            assert (self.cache.queue, self.cache.pool.num_free) == (queue, free)
            return
        chain = chain_of(namespace, prompt[:expected])
        in_flight = [p in self.cache._published for p in lease.page_table.tolist()]
        written = in_flight.index(True) * self.page_size if True in in_flight else expected
        request = Request(lease, namespace, prompt, prompt[:expected], chain, written)
        request.in_step = written < expected
        self.requests.append(request)
        self.past.append((namespace, prompt))
        self.counts["hits"] += bool(expected)
        self.counts["hits in flight"] += request.in_step

    def publish(self) -> None:
        """A prefill chunk, or tokens beyond the prompt."""
        request = self.any_request()
        if request is None or request.published or len(request.tokens) >= self.longest:
            return
        tokens = request.prompt[len(request.tokens) :] or self.some(self.rng.randint(1, 3))
        tokens = tokens[: self.rng.choice([1, 2, self.page_size, len(tokens)])]
        if self.reserve(request, len(tokens)):
            start = len(request.tokens)
            self.extend(request, tokens)
            self.cache.publish(request.lease, np.array(tokens, np.int32))
            request.published.append((start, start + len(tokens)))
            request.in_step = True
            self.counts["published"] += 1

    def publish_late(self) -> None:
        """Tokens whose KV an earlier step wrote, as the engine does it with decoded ones."""
        request = self.any_request()
        if request is None or request.in_step or len(request.tokens) >= self.longest:
            return
        tokens = self.some(self.rng.randint(1, self.page_size))
        if self.reserve(request, len(tokens)):
            start = len(request.tokens)
            self.extend(request, tokens)
            self.write(request, start, len(request.tokens))
            self.cache.publish(request.lease, tokens, written=True)
            request.written = len(request.tokens)
            self.counts["published late"] += 1

    def reserve(self, request: Request, count: int) -> bool:
        before = self.snapshot()
        wanted = len(request.tokens) + count
        have = len(request.lease.page_table)
        evicted = self.cache.stats.evicted_pages
        try:
            self.cache.reserve(request.lease, wanted)
        except OutOfPages:
            assert self.snapshot() == before, "OutOfPages changed something"
            assert -(-wanted // self.page_size) - have > self.cache.pool.num_free
            self.counts["out of pages"] += 1
            return False
        assert self.cache.pool.num_free == before[1] - max(0, -(-wanted // self.page_size) - have)
        self.counts["evictions"] += self.cache.stats.evicted_pages - evicted
        self.scribble()
        return True

    def run_step(self) -> None:
        for request in self.requests:
            for start, end in request.published:
                self.write(request, start, end)
        self.cache.commit()
        for request in self.requests:
            self.settle(request)
            request.written = len(request.tokens)
        self.counts["steps"] += 1

    def fail_step(self) -> None:
        """The step dies half-way: garbage in what it was about to write."""
        for request in self.requests:
            for start, end in request.published:
                for at in range(start, end):
                    if self.rng.random() < 0.7:
                        page = request.lease.page_table[at // self.page_size]
                        self.kv.slots[page, at % self.page_size] = self.kv.garbage()
        self.cache.rollback()
        for request in self.requests:
            if request.in_step:
                pages = -(-request.written // self.page_size)
                assert request.lease.num_tokens == request.written, "not back where it was written"
                assert len(request.lease.page_table) == pages, "reserved pages survive"
            del request.tokens[request.written :], request.chain[request.written :]
            self.settle(request)
        self.counts["rollbacks"] += 1

    def release(self) -> None:
        request = self.any_request()
        if request is None:
            return
        if request.published:
            with pytest.raises(LeaseError):
                self.cache.release(request.lease)
            return
        self.cache.release(request.lease)
        self.requests.remove(request)
        self.past.append((request.namespace, request.tokens))

    def evict(self) -> None:
        queue, free, count = self.cache.queue, self.cache.pool.num_free, self.rng.randint(1, 4)
        could = [p for p in queue if p in self.cached() and not self.cache.pool.refs[p]]
        assert self.cache.evict(count) == min(count, len(could))
        assert not self.cached() & set(could[:count]), "evicted out of turn"
        assert (self.cache.queue, self.cache.pool.num_free) == (queue, free)

    def pin(self) -> None:
        namespace, tokens = self.rng.choice(self.past[-30:])
        tokens = tokens[: self.rng.randint(0, len(tokens))]
        name = self.rng.choice("abc")
        before = self.snapshot()
        try:
            self.cache.pin(name, tokens, namespace)
        except PinError:
            assert self.snapshot() == before
            return
        assert (namespace, name) not in self.pins
        self.pins[namespace, name] = tokens
        self.counts["pins"] += 1

    def unpin(self) -> None:
        if self.pins:
            namespace, name = self.rng.choice(list(self.pins))
            self.cache.unpin(name, namespace)
            del self.pins[namespace, name]

    def reset(self) -> None:
        if self.requests or self.pins:
            with pytest.raises(LeaseError):
                self.cache.reset()
        else:
            queue = self.cache.queue
            self.cache.reset()
            assert self.cache.queue == queue and not self.cached()

    # ------------------------------------------------------------------ verification

    def verify(self) -> None:
        """Invariants, what leases read, what cached pages hold, and what pins keep."""
        self.scribble()
        self.cache.check()
        for request in self.requests:
            assert request.lease.num_tokens == len(request.tokens)
            readable = request.written
            read = self.kv.read(request.lease.page_table, readable)
            assert read == request.chain[:readable], "a lease reads wrong KV"
        for page, block in enumerate(self.cache._blocks):
            if block is not None and page not in self.cache._published:
                chain = chain_of(block.namespace, block.prefix().tolist())
                assert self.kv.slots[page].tolist() == chain[-self.page_size :], f"page {page}"
        for (namespace, _), tokens in self.pins.items():
            whole = len(tokens) // self.page_size * self.page_size
            assert self.cache.match([*tokens[:whole], SENTINEL], namespace) == whole

    def expected_hit(self, tokens: list[int], namespace: Hashable) -> int:
        """By the names of all cached prefixes, not by hashes."""
        names = {
            chain_of(block.namespace, block.prefix().tolist())[-1]
            for block in self.cache._blocks
            if block is not None
        }
        chain = chain_of(namespace, tokens)
        hit = 0
        while hit + self.page_size < len(tokens) and chain[hit + self.page_size - 1] in names:
            hit += self.page_size
        return hit

    def cached(self) -> set[int]:
        return {page for page, block in enumerate(self.cache._blocks) if block is not None}

    def scribble(self) -> None:
        """Pages that hold nothing and that nobody uses: whoever reads one must fail."""
        idle = self.cache.pool.refs == 0
        idle[list(self.cached())] = False
        self.kv.scribble(idle)

    def snapshot(self) -> tuple[object, int, object]:
        cache = self.cache
        tables = [r.lease.page_table.tolist() for r in self.requests]
        state = (cache.queue, cache.pool.refs.tolist(), tables, self.cached(), cache.pins)
        return state, cache.pool.num_free, cache.stats.evicted_pages

    # ------------------------------------------------------------------ helpers

    def any_request(self) -> Request | None:
        return self.rng.choice(self.requests) if self.requests else None

    def some(self, count: int) -> list[int]:
        return [self.rng.randrange(self.alphabet) for _ in range(count)]

    def extend(self, request: Request, tokens: list[int]) -> None:
        request.tokens = request.tokens + tokens
        request.chain = chain_of(request.namespace, request.tokens)

    def write(self, request: Request, start: int, end: int) -> None:
        for at in range(start, end):
            page = request.lease.page_table[at // self.page_size]
            self.kv.slots[page, at % self.page_size] = request.chain[at]

    def settle(self, request: Request) -> None:
        request.published.clear()
        request.in_step = False


SHAPES = [(1, 12), (1, 40), (2, 16), (4, 8), (4, 30), (16, 5), (16, 20)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("page_size", "num_pages"), SHAPES)
def test_random_schedules_read_the_right_bytes_and_lose_no_page(
    page_size: int, num_pages: int, seed: int
) -> None:
    Schedule(seed, page_size, num_pages).run(300)


def test_the_random_schedules_reach_every_corner() -> None:
    counts: Counter[str] = Counter()
    for shape in SHAPES:
        schedule = Schedule(0, *shape)
        schedule.past += [(namespace, [0, 1] * 10) for namespace in NAMESPACES]
        schedule.run(600)
        counts += schedule.counts
    corners = ["hits", "hits in flight", "out of pages", "evictions", "pins", "published late"]
    assert not [corner for corner in corners if counts[corner] < 5], counts
