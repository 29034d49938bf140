"""`HashBlockCache` does what the rules in `block_rules.py` say, page by page.

That the rules are vLLM's is for `bench/peers/conformance` to show; here are they together with what
vLLM does not have, so that no comparison with it can see that: leases that only look, while pages
run out or are evicted; failed steps; tokens published late; more pages reserved than published;
pins; counts of free, held, pinned and evicted pages; blocks of other sizes than it was run with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from random import Random

import pytest

from radixcache import HashBlockCache, LeaseError, OutOfPages, PagePool, PinError
from radixcache.events import Cleared, Evicted, Stored
from radixcache.hash_block import BlockLease
from tests.index.block_rules import Hold, Rules, Told

NAMESPACES: tuple[Hashable, ...] = (None, "tenant")


@dataclass(eq=False)
class Pair:
    """A lease and what the rules say of it."""

    lease: BlockLease
    hold: Hold
    prompt: list[int]


class Lockstep:
    """Random operations, each on both, with all that can be seen compared after it."""

    def __init__(self, seed: int, size: int, num_pages: int) -> None:
        self.rng = Random(f"{seed}/{size}/{num_pages}")
        budget = self.rng.choice([num_pages // 2, num_pages - 1, 3])
        self.rules = Rules(num_pages, size, budget)
        pool = PagePool(num_pages, size)
        self.cache = HashBlockCache(pool)
        self.cache.pin_budget = budget
        self.heard: list[Stored | Evicted | Cleared] = []
        self.cache.events.append(self.heard.append)
        self.pairs: list[Pair] = []
        self.past: list[tuple[Hashable, list[int]]] = [(None, [])]
        self.longest = size * num_pages
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        choices = {
            self.acquire: 20,
            self.reserve: 10,
            self.publish: 30,
            self.commit: 4,
            self.rollback: 4,
            self.release: 20,
            self.evict: 2,
            self.pin: 7,
            self.unpin: 3,
            self.reset: 1,
        }
        for _ in range(operations):
            self.rng.choices(list(choices), list(choices.values()))[0]()
            self.compare()
        self.commit()
        for pair in [*self.pairs]:
            self.leave(pair)
            self.compare()
        while self.rules.pins:
            self.unpin()
            self.compare()
        assert len(self.rules.line) == self.cache.pool.num_free == self.rules.num_pages - 1

    # ------------------------------------------------------------------ operations

    def acquire(self) -> None:
        if len(self.pairs) > 6:
            return
        rng, size = self.rng, self.rules.size
        namespace, known = self.any_text()
        prompt = known[: rng.choice([len(known), rng.randint(0, len(known))])]
        more = [rng.randrange(2) for _ in range(rng.choice([1, size, rng.randint(1, 3 * size)]))]
        prompt = (prompt + more)[: self.longest]
        resumed = rng.random() < 0.2
        self.note(f"acquire {namespace} {prompt} {resumed}")
        for end in (len(prompt), len(prompt) - 1, rng.randint(1, len(prompt))):
            asked = prompt[:end]
            match = len(self.rules.find(asked, namespace, len(asked) - 1)) * size
            assert self.cache.match(asked, namespace) == match
            length = len(self.rules.find(asked, namespace, len(asked))) * size
            assert self.cache.cached_length(asked, namespace) == length
        line = [*self.rules.line]
        hold = self.rules.acquire([*prompt], namespace, resumed)
        lease = self.cache.acquire(prompt, namespace, resumed=resumed)
        self.pairs.append(Pair(lease, hold, prompt))
        self.past.append((namespace, prompt))
        self.counts["hits in flight"] += hold.back is not None
        if rng.random() < 0.3:  # it has only looked
            self.compare()
            self.leave(self.pairs[-1])
            assert self.cache.queue == line

    def reserve(self) -> None:
        """Room for some tokens, often for more than one publication fills."""
        pair = self.any_pair()
        if pair is not None:
            self.make_room(pair, len(pair.hold.tokens) + self.rng.randint(0, 3 * self.rules.size))

    def make_room(self, pair: Pair, num_tokens: int) -> bool:
        self.note(f"reserve {self.pairs.index(pair)} {num_tokens}")
        looking = any(pair.hold.table and not pair.hold.uses for pair in self.pairs)
        evicted = self.rules.evicted
        room = self.rules.reserve(pair.hold, num_tokens)
        self.counts["evictions beside leases that look"] += looking * (self.rules.evicted - evicted)
        self.counts["out of pages"] += not room
        self.counts["out of pages for leases that look"] += looking and not room
        if room:
            self.cache.reserve(pair.lease, num_tokens)
        else:
            with pytest.raises(OutOfPages):
                self.cache.reserve(pair.lease, num_tokens)
        return room

    def publish(self) -> None:
        """A chunk of the prompt, or what follows it; in flight, or written already."""
        after = [p for p in self.pairs if p.hold.back is not None and not p.hold.publishing]
        pair = self.rng.choice(after) if after else self.any_pair()
        if pair is None or pair.hold.publishing:
            return
        hold, rng = pair.hold, self.rng
        left = pair.prompt[len(hold.tokens) :] or [rng.randrange(2) for _ in range(4)]
        tokens = left[: rng.choice([1, self.rules.size, len(left)])]
        if not self.make_room(pair, len(hold.tokens) + len(tokens)):
            return
        written = rng.random() < (0.6 if after else 0.3)
        self.note(f"publish {self.pairs.index(pair)} {tokens} {written}")
        self.counts["published late"] += written and hold.back is None
        self.counts["written after what is in flight"] += written and hold.back is not None
        self.rules.publish(hold, tokens, written)
        self.cache.publish(pair.lease, tokens, written=written)

    def commit(self) -> None:
        self.note("commit")
        self.rules.commit()
        self.cache.commit()

    def rollback(self) -> None:
        self.note("rollback")
        self.counts["leases rolled back"] += len(self.rules.flight)
        self.counts["blocks rolled back"] += len(self.rules.fresh)
        self.rules.rollback()
        self.cache.rollback()

    def release(self) -> None:
        pair = self.any_pair()
        if pair is not None and pair.hold.publishing:
            with pytest.raises(LeaseError):
                self.cache.release(pair.lease)
        elif pair is not None:
            self.leave(pair)

    def leave(self, pair: Pair) -> None:
        self.note(f"release {self.pairs.index(pair)}")
        spare = len(pair.hold.table) - -(-len(pair.hold.tokens) // self.rules.size)
        self.counts["released with spare pages"] += spare > 0
        self.past.append((pair.hold.namespace, [*pair.hold.tokens]))
        self.rules.release(pair.hold)
        self.cache.release(pair.lease)
        self.pairs.remove(pair)

    def evict(self) -> None:
        count = self.rng.randint(1, 3)
        self.note(f"evict {count}")
        assert self.cache.evict(count) == self.rules.evict(count)

    def pin(self) -> None:
        namespace, tokens = self.any_text()
        tokens = tokens[: self.rng.choice([len(tokens), self.rng.randint(0, len(tokens))])]
        self.counts["pins of what is partly in flight"] += (
            len(
                {
                    page in self.rules.fresh
                    for page in self.rules.find(tokens, namespace, len(tokens))
                }
            )
            > 1
        )
        name = self.rng.choice("abc")
        self.note(f"pin {name} {namespace} {tokens}")
        if self.rules.pin(name, [*tokens], namespace):
            self.cache.pin(name, tokens, namespace)
            self.counts["pins"] += 1
        else:
            with pytest.raises(PinError):
                self.cache.pin(name, tokens, namespace)

    def unpin(self) -> None:
        if self.rules.pins:
            namespace, name = self.rng.choice([*self.rules.pins])
            self.note(f"unpin {name} {namespace}")
            self.rules.unpin(name, namespace)
            self.cache.unpin(name, namespace)

    def reset(self) -> None:
        """Refused while there is a pin or a lease, if only one that looks."""
        if self.rng.random() < 0.7:
            self.commit()
            for pair in [pair for pair in self.pairs if pair.hold.uses]:
                self.leave(pair)
            while self.rules.pins and self.rng.random() < 0.9:
                self.unpin()
        self.counts["resets"] += not self.rules.holds
        looks = [not hold.uses for hold in self.rules.holds]
        self.counts["resets beside leases that look"] += bool(looks) and all(looks)
        self.note("reset")
        if self.rules.reset():
            self.cache.reset()
        else:
            with pytest.raises(LeaseError):
                self.cache.reset()

    # ------------------------------------------------------------------ comparison

    def compare(self) -> None:
        """All that can be seen of both."""
        rules, cache = self.rules, self.cache
        cache.check()
        assert cache.queue == rules.line, self.said("the queue")
        assert cache.pool.num_free == len(rules.free), self.said("free pages")
        holders = Counter([0, *rules.held])
        refs = [holders[page] for page in range(rules.num_pages)]
        assert cache.pool.refs.tolist() == refs, self.said("holders of pages")
        self.compare_blocks()
        for pair in self.pairs:
            lease, hold = pair.lease, pair.hold
            assert lease.page_table.tolist() == hold.table, self.said("a page table")
            assert lease.num_tokens == len(hold.tokens), self.said("the length of a lease")
            assert lease.cached_tokens == hold.cached, self.said("a hit")
            assert lease.capacity == len(hold.table) * rules.size
        pins = {key: len(pin.tokens) for key, pin in rules.pins.items()}
        assert cache.pins == pins and cache.pinned_pages == len(rules.pinned())
        for namespace in NAMESPACES:
            assert cache.pinned_pages_of(namespace) == len(rules.pinned(namespace))
        stats = cache.stats
        asked = [
            stats.requests, stats.query_tokens, stats.hit_tokens,
            stats.resumed_query_tokens, stats.resumed_hit_tokens,
        ]  # fmt: skip
        assert asked == rules.asked, self.said("statistics")
        assert stats.evicted_pages == rules.evicted, self.said("evicted pages")
        assert stats.evicted_tokens == rules.evicted * rules.size
        assert list(map(as_told, self.heard)) == rules.told, self.said("events")
        self.heard.clear()
        rules.told.clear()

    def compare_blocks(self) -> None:
        """What each page is cached for; of several pages with one block, which is found."""
        cached = {
            page: (block.namespace, tuple(block.prefix().tolist()))
            for page, block in enumerate(self.cache._blocks)
            if block is not None
        }
        assert cached == self.rules.content, self.said("what pages are cached for")
        first: dict[object, int] = {}
        for page, name in self.rules.content.items():
            found = first.setdefault(name, page)
            block = self.cache._blocks[page]
            assert block is not None and self.cache._map.get(block.hash) == found

    def any_text(self) -> tuple[Hashable, list[int]]:
        """What was asked for or computed lately, or is running."""
        running = [(pair.hold.namespace, [*pair.hold.tokens]) for pair in self.pairs]
        namespace, tokens = self.rng.choice([*self.past[-15:], *running, *running])
        return self.rng.choice([namespace] * 8 + [*NAMESPACES]), tokens

    def any_pair(self) -> Pair | None:
        return self.rng.choice(self.pairs) if self.pairs else None

    def note(self, operation: str) -> None:
        self.trace.append(operation)

    def said(self, what: str) -> str:
        return f"{what}, after\n" + "\n".join(self.trace)


def as_told(event: Stored | Evicted | Cleared) -> Told:
    if isinstance(event, Cleared):
        return ("cleared", None, (), 0)
    kind = "stored" if isinstance(event, Stored) else "evicted"
    return (kind, event.namespace, tuple(event.tokens.tolist()), event.start)


SHAPES = [(1, 9), (2, 14), (3, 30), (16, 12), (40, 7)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "num_pages"), SHAPES)
def test_the_cache_follows_the_rules_step_by_step(size: int, num_pages: int, seed: int) -> None:
    print(f"seed {seed}")
    Lockstep(seed, size, num_pages).run(400)


def test_the_operations_reach_every_corner() -> None:
    counts: Counter[str] = Counter()
    for seed, shape in enumerate(SHAPES):
        lockstep = Lockstep(seed, *shape)
        lockstep.run(700)
        counts += lockstep.counts
    corners = [
        "hits in flight", "out of pages", "out of pages for leases that look", "published late",
        "evictions beside leases that look", "leases rolled back", "blocks rolled back", "pins",
        "released with spare pages", "written after what is in flight", "resets",
        "pins of what is partly in flight", "resets beside leases that look",
    ]  # fmt: skip
    assert not [corner for corner in corners if counts[corner] < 3], counts
