"""Any sequence of calls on any cache keeps the contract of `PrefixCache`, and every byte of KV.

Hypothesis plays a scheduler, whose steps may fail. `make test-exhaustive` draws more examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixcache import HashBlockCache, NoCache, OutOfPages, PagePool, RadixCache
from tests.index.drive import put
from tests.index.machine import Machine
from tests.index.model import ENDLESS, NAMESPACES, Kind, Request

MOST_REQUESTS, MOST_TOKENS = 5, 60
Text = list[tuple[int, int]]
"""Some tokens, as runs of equal ones; see `Contract.spell`."""
Where = tuple[int, "int | None"]
"""A known text, the latest first, and where it is cut off."""

NUMBER = st.integers(0, 99)
TEXT = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=3)
MAYBE_TEXT: st.SearchStrategy[Text] = st.just([]) | TEXT
WHERE = st.tuples(st.sampled_from([0, 0, 0, 1, 2, 3, 5, 8]), st.none() | NUMBER)
HOW = st.sampled_from(["in flight", "in flight", "in flight", "written", "nothing"])


class Contract(RuleBasedStateMachine):
    """A cache under any sequence of calls; a subclass says which, and the size of its pages."""

    kind: Kind = RadixCache
    page_size = 4
    slots: tuple[int, ...] = ()
    counts: Counter[str]
    """How often what happened, in all examples together."""

    @initialize(num_tokens=st.sampled_from([24, 48, 96]), budget=st.sampled_from([None, 4, 99]))
    def start(self, num_tokens: int, budget: int | None) -> None:
        num_pages = max(6, num_tokens // self.page_size)
        self.machine = Machine(
            self.kind, self.page_size, num_pages, budget, self.counts, self.slots
        )
        self.texts: list[tuple[Hashable, list[int]]] = [(None, [])]

    def spell(self, text: Text) -> list[int]:
        size = self.page_size
        counts = (1, 2, 3, max(1, size - 1), size, size + 1)
        return [token for token, count in text for _ in range(counts[count])]

    def known(self, where: Where) -> tuple[Hashable, list[int]]:
        """A text that was asked for, computed or is being so, whole or in part."""
        at, cut = where
        running = [(request.namespace, request.tokens) for request in self.machine.leases]
        texts = [*running, *self.texts]
        namespace, tokens = texts[-1 - at % len(texts)]
        return namespace, tokens if cut is None else tokens[: cut % (len(tokens) + 1)]

    def request(self, number: int) -> Request:
        return [*self.machine.leases][number % len(self.machine.leases)]

    def leased(self) -> bool:
        return bool(self.machine.leases)

    @rule(where=WHERE, text=TEXT)
    def look_up(self, where: Where, text: Text) -> None:
        namespace, tokens = self.known(where)
        self.machine.look_up(namespace, [*tokens, *self.spell(text)])

    @precondition(lambda self: len(self.machine.leases) < MOST_REQUESTS)
    @rule(
        where=WHERE,
        text=MAYBE_TEXT,
        tenant=st.sampled_from([None, None, *NAMESPACES]),
        resumed=st.booleans(),
        include_last=st.booleans(),
        leave=st.integers(0, 3),
    )
    def acquire(
        self,
        where: Where,
        text: Text,
        tenant: Hashable = None,
        resumed: bool = False,
        include_last: bool = False,
        leave: int = 3,
    ) -> None:
        namespace, tokens = self.known(where)
        prompt = [*tokens, *self.spell(text)][:MOST_TOKENS] or [0]
        namespace = tenant or namespace
        request = self.machine.acquire(namespace, prompt, resumed, include_last, leave=not leave)
        if leave:
            self.machine.load(request)
        self.texts.append((namespace, prompt))

    @precondition(leased)
    @rule(number=NUMBER, more=st.integers(0, 20))
    def reserve(self, number: int, more: int) -> None:
        request = self.request(number)
        self.machine.make_room(request, len(request.tokens) + more)

    @precondition(leased)
    @rule(number=NUMBER, chunk=NUMBER, text=TEXT, how=HOW)
    def publish(self, number: int, chunk: int, text: Text, how: str) -> None:
        """A chunk of the prompt or decoded tokens, for the step to write or written before."""
        request = self.request(number)
        if how == "nothing":
            self.machine.publish_nothing(request)
            return
        left = request.prompt[len(request.tokens) :] or self.spell(text)
        left = left[: MOST_TOKENS - len(request.tokens)]
        if left:
            self.machine.publish(request, left[: 1 + chunk % len(left)], how == "written")

    @rule(
        plans=st.lists(st.tuples(WHERE, MAYBE_TEXT, NUMBER, HOW), min_size=1, max_size=3),
        end=st.sampled_from(["run", "run", "fail", "open"]),
        leave=st.booleans(),
    )
    def serve(self, plans: list[Any], end: str, leave: bool) -> None:
        """New requests, many of them whole, in one step."""
        for where, text, chunk, how in plans:
            if len(self.machine.leases) == MOST_REQUESTS:
                self.release(0)
            if len(self.machine.leases) < MOST_REQUESTS:
                self.acquire(where, text, include_last=chunk > 49)
                self.publish(-1, -1 if chunk % 2 else chunk, text, how)
        if end == "run":
            self.step(everybody=True)
        if end == "fail":
            self.fail("made")
        if leave:
            self.release(-1)

    @precondition(leased)
    @rule(number=NUMBER)
    def release(self, number: int) -> None:
        request = self.request(number)
        if self.machine.release(request):
            self.texts.append((request.namespace, request.tokens))

    @rule(everybody=st.booleans())
    def step(self, everybody: bool) -> None:
        self.machine.step(everybody)

    @rule(copies=st.sampled_from(["not taken", "lost", "made"]))
    def fail(self, copies: str) -> None:
        self.machine.fail(copies)

    @rule(count=st.sampled_from([0, 1, 2, 3, 99]))
    def evict(self, count: int) -> None:
        self.machine.evict(count)

    @rule(name=st.sampled_from("ab"), where=WHERE, drop=st.integers(0, 3))
    def pin(self, name: str, where: Where, drop: int) -> None:
        namespace, tokens = self.known(where)
        if drop == 3:
            self.machine.unpin(name, namespace)
        else:
            self.machine.pin(name, namespace, tokens)

    @rule(drain=st.booleans())
    def reset(self, drain: bool) -> None:
        if drain:
            self.machine.let_go()
        self.machine.reset()

    @invariant()
    def compare(self) -> None:
        self.machine.compare()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.finish()


def run_examples(
    contract: type[Contract], seeds: Sequence[int | None] = (None,), **options: Any
) -> Counter[str]:
    """Random examples of it, from each seed; how often what happened."""
    counts = Counter[str]()
    for number in seeds:
        run_state_machine_as_test(
            seed(number)(type(contract.__name__, (contract,), {"counts": counts})),
            settings=settings(
                stateful_step_count=50,
                database=None,
                deadline=None,
                suppress_health_check=[*HealthCheck],
                **options,
            ),
        )
    return counts


CORNERS: dict[Kind, set[str]] = {
    NoCache: {"out of pages", "published as written", "failed steps"},
    HashBlockCache: {
        "evictions", "hits", "hits in flight", "out of pages", "pins", "pins refused",
        "published as written", "resets refused", "failed steps",
    },
}  # fmt: skip
CORNERS[RadixCache] = CORNERS[HashBlockCache] | {"hits of the whole", "tables repointed"}
FEW, SOME, MANY = 10, 200, 600

CASES = [(kind, (), size) for kind in (RadixCache, HashBlockCache) for size in (1, 4, 16)]
NONE = (NoCache, (), 4)  # whose pages are of no one else's
CHAINS = [(5,), (ENDLESS,), (2, 6), (2, ENDLESS)]
TIERS = [(RadixCache, slots, size) for slots in CHAINS for size in (1, 4, 16)]
SOME_TIERS = [TIERS[0], TIERS[4], TIERS[7], TIERS[9]]


@pytest.mark.parametrize(
    ("kind", "slots", "page_size", "examples"),
    [
        *((*case, FEW) for case in (*CASES, NONE, *SOME_TIERS)),
        *(pytest.param(*case, MANY, marks=pytest.mark.exhaustive) for case in CASES),
        *(pytest.param(*case, SOME, marks=pytest.mark.exhaustive) for case in TIERS),
    ],
)
def test_any_sequence_of_calls_keeps_the_contract(
    kind: Kind, slots: tuple[int, ...], page_size: int, examples: int
) -> None:
    """Of few examples always the same, which reach what can happen; of many new ones each time,
    and a failure is shrunk. After its first ten Hypothesis varies those that it has."""
    members = {"kind": staticmethod(kind), "page_size": page_size, "slots": slots}
    counts = run_examples(
        type("Contract", (Contract,), members),
        range(6) if examples == FEW else (None,),
        max_examples=examples,
        phases=[Phase.generate] if examples == FEW else [Phase.generate, Phase.shrink],
    )
    corners = CORNERS[kind] | ({"copies"} if kind is RadixCache and page_size > 1 else set())
    if slots:
        corners = {"evictions", "loads from tier 0"}
        corners |= {"pages in a second tier"} if len(slots) > 1 else set()
    if page_size == 16:  # which they are depends on what is imported
        corners -= {"tables repointed"}
    missed = [corner for corner in corners if not counts[corner]]
    assert examples != FEW or not missed, f"the examples do not reach: {missed}"


def test_what_a_lease_finds_is_held_though_held_pages_were_counted_before() -> None:
    """A call that the few examples may not draw."""
    cache = RadixCache(PagePool(num_pages=4, page_size=1))
    put(cache, [1, 2])
    cache.acquire([1, 9])
    with pytest.raises(OutOfPages):  # which counts
        cache.reserve(cache.acquire([3, 3]), 4)
    cache.acquire([1, 2, 9])
    cache.check()


def test_several_pages_of_a_hash_block_lease_that_only_looks_are_passed_over() -> None:
    """Another that the few examples may not draw."""
    cache = HashBlockCache(PagePool(num_pages=6, page_size=1))
    put(cache, [1, 2])
    put(cache, [3, 4])
    looking = cache.acquire([1, 2, 9])
    lease = cache.acquire([5, 6, 7])
    cache.reserve(lease, 3)
    assert not {*lease.page_table.tolist()} & {*looking.page_table.tolist()}
    cache.check()
