"""Random operations, by hypothesis and by seeded drivers, never break an invariant or a byte."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.cover import seeds
from tests.index.machine import Machine, Request
from tests.index.reference import NAMESPACES
from tests.index.stress import SHAPES, RandomDriver, stress

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
INDEX = st.integers(0, 100)
NAMESPACE = st.sampled_from([None, None, None, *NAMESPACES])
CHAOS = st.integers(0, 1 << 16)


class CacheUnderRules(RuleBasedStateMachine):
    """`Machine`, with hypothesis at the wheel; a subclass fixes the page size."""

    page_size = 4

    @initialize(num_tokens=st.sampled_from([16, 32, 64, 128]))
    def start(self, num_tokens: int) -> None:
        num_pages = max(6, num_tokens // self.page_size)
        self.machine = Machine(self.page_size, num_pages)
        self.past: list[list[int]] = [[]]

    def one_of(self, index: int) -> Request:
        """A live request."""
        return self.machine.requests[index % len(self.machine.requests)]

    def leased(self) -> bool:
        """Whether any request is live."""
        return bool(self.machine.requests)

    @rule(start=INDEX, cut=INDEX, more=TOKENS, namespace=NAMESPACE)
    def match(self, start: int, cut: int, more: list[int], namespace: str | None) -> None:
        known = self.past[start % len(self.past)]
        self.machine.match(known[: cut % (len(known) + 1)] + more, namespace)

    @precondition(lambda self: len(self.machine.requests) < 5)
    @rule(
        start=INDEX,
        cut=INDEX,
        more=TOKENS,
        namespace=NAMESPACE,
        resumed=st.booleans(),
        include_last=st.booleans(),
    )
    def acquire(
        self,
        start: int,
        cut: int,
        more: list[int],
        namespace: str | None,
        resumed: bool,
        include_last: bool,
    ) -> None:
        known = self.past[start % len(self.past)]
        prompt = known[: cut % (len(known) + 1)] + more
        self.past.append(prompt)
        self.machine.acquire(prompt, namespace, resumed, include_last)

    @precondition(leased)
    @rule(index=INDEX)
    def publish_nothing(self, index: int) -> None:
        self.machine.publish_nothing(self.one_of(index))

    @rule(start=INDEX, cut=INDEX, more=TOKENS, chaos=CHAOS, leave=st.booleans())
    def serve(self, start: int, cut: int, more: list[int], chaos: int, leave: bool) -> None:
        """A whole request in one step of its own."""
        known = self.past[start % len(self.past)]
        prompt = known[: cut % (len(known) + 1)] + more
        self.past.append(prompt)
        request = self.machine.acquire(prompt)
        if self.machine.reserve(request, len(prompt)):
            self.machine.publish(request, request.to_compute)
            self.machine.run_step(chaos)
        if leave:
            self.machine.release(request)

    @precondition(leased)
    @rule(index=INDEX, chunk=st.integers(1, 9), more=TOKENS)
    def schedule(self, index: int, chunk: int, more: list[int]) -> None:
        request = self.one_of(index)
        if not self.machine.may_go_on(request):
            return
        tokens = (request.to_compute or more)[:chunk]
        if self.machine.reserve(request, len(request.tokens) + len(tokens)):
            self.machine.publish(request, tokens)

    @precondition(leased)
    @rule(index=INDEX, more=st.integers(0, 9))
    def reserve(self, index: int, more: int) -> None:
        request = self.one_of(index)
        self.machine.reserve(request, len(request.tokens) + more)

    @precondition(leased)
    @rule(index=INDEX, tokens=TOKENS)
    def publish(self, index: int, tokens: list[int]) -> None:
        request = self.one_of(index)
        room = request.reserved - len(request.tokens)
        if room > 0 and self.machine.may_go_on(request):
            self.machine.publish(request, (request.to_compute or tokens)[:room])

    @precondition(leased)
    @rule(index=INDEX, tokens=TOKENS)
    def publish_written(self, index: int, tokens: list[int]) -> None:
        request = self.one_of(index)
        room = request.reserved - len(request.tokens)
        if room > 0 and self.machine.may_go_on(request):
            self.machine.publish_written(request, (request.to_compute or tokens)[:room])

    @precondition(leased)
    @rule(index=INDEX, extra=st.integers(1, 3))
    def publish_unreserved(self, index: int, extra: int) -> None:
        self.machine.publish_unreserved(self.one_of(index), extra)

    @rule(chaos=CHAOS)
    def run_step(self, chaos: int) -> None:
        self.machine.run_step(chaos)

    @rule(chaos=CHAOS)
    def fail_step(self, chaos: int) -> None:
        self.machine.fail_step(chaos)

    @precondition(leased)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        request = self.one_of(index)
        if self.machine.release(request):
            self.past.append(request.tokens)

    @rule(num_pages=st.integers(0, 9))
    def evict(self, num_pages: int) -> None:
        self.machine.evict(num_pages)

    @precondition(lambda self: not self.machine.reference.in_flight())
    @rule(name=st.sampled_from("ab"), start=INDEX, namespace=NAMESPACE)
    def pin(self, name: str, start: int, namespace: str | None) -> None:
        tokens = self.past[start % len(self.past)]
        if tokens:
            self.machine.pin(name, tokens, namespace)

    @rule(name=st.sampled_from("ab"), namespace=NAMESPACE)
    def unpin(self, name: str, namespace: str | None) -> None:
        self.machine.unpin(name, namespace)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 9:
            self.machine.reset()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.finish()


@pytest.mark.parametrize("examples", [25, pytest.param(250, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_any_sequence_of_calls_keeps_every_invariant_and_every_byte(
    page_size: int, examples: int
) -> None:
    machine: Any = type(f"PageSize{page_size}", (CacheUnderRules,), {"page_size": page_size})
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()


@seeds(1, 4)
@pytest.mark.parametrize(("page_size", "num_pages"), SHAPES)
def test_an_erratic_scheduler_never_reads_a_wrong_byte(
    seed: int, page_size: int, num_pages: int
) -> None:
    stress(seed, page_size, num_pages, operations=1000, check_every=5)


def test_the_random_operations_reach_every_corner() -> None:
    counts: Counter[str] = Counter()
    for shape in SHAPES:
        counts += stress(0, *shape, operations=700, check_every=50)
    corners = [
        "copies",
        "duplicates",
        "hits in flight",
        "hits in mid-page",
        "out of pages",
        "publish written",
        "pin refused",
        "release refused",
        "reserve evicts",
        "rollbacks",
        "tables repointed",
        "whole hits in mid-page",
        "written in flight",
    ]
    assert not [corner for corner in corners if counts[corner] < 3], counts


def test_the_same_operations_give_the_same_page_tables() -> None:
    def tables(seed: int) -> list[object]:
        machine = Machine(4, 16)
        driver = RandomDriver(machine, Random(seed))
        seen: list[object] = []
        for _ in range(400):
            driver.one()
            seen.append([request.lease.page_table.tolist() for request in machine.requests])
        return seen

    assert tables(11) == tables(11)
    assert tables(11) != tables(12)
