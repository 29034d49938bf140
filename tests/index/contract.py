"""A Hypothesis machine that calls a cache at random, and compares it with a model each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixcache import RadixCache
from tests.index.machine import Machine
from tests.index.model import NAMESPACES, Kind, Request

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
