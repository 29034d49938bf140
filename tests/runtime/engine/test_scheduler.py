"""Who waits for a page that another request of the same step is writing, and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.schemes.modes import parse_mode
from radixcache.bench.workloads.generators import generate
from radixcache.runtime.engine.request import Request
from radixcache.runtime.engine.scheduler import Scheduler

PROMPT = np.arange(60, dtype=np.int32)
ANSWER = np.arange(1000, 1003, dtype=np.int32)


def make_engine(mode: str, policy: str = "fcfs") -> IndexEngine:
    return IndexEngine(Scheduler(parse_mode(mode).make(4096), 512, 16, policy))  # type: ignore[arg-type]


def first_tokens(engine: IndexEngine, requests: list[Request]) -> list[int]:
    """The step in which each request gets its first token."""
    steps: dict[Request, int] = {}
    for step in range(1, 50):
        for request in engine.step():
            steps.setdefault(request, step)
        engine.cache.check()
        if not engine.has_work:
            break
    return [steps[request] for request in requests]


@pytest.mark.parametrize("policy", ["fcfs", "longest-prefix"])
@pytest.mark.parametrize(
    ("mode", "steps", "computed"),
    [
        ("radix-16", [1, 2, 2, 2], [60, 1, 1, 1]),
        ("radix-64", [1, 2, 2, 2], [60, 1, 1, 1]),
        ("radix-1", [1, 1, 1, 1], [60, 1, 1, 1]),
        ("hash-16", [1, 1, 1, 1], [60, 12, 12, 12]),  # as vLLM, which computes them at once
        ("none", [1, 1, 1, 1], [60, 60, 60, 60]),
    ],
)
def test_twins_wait_one_step_for_a_page_that_only_then_can_be_shared(mode, steps, computed, policy):
    engine = make_engine(mode, policy)
    twins = [engine.add(PROMPT, ANSWER) for _ in steps]
    assert first_tokens(engine, twins) == steps
    assert [twin.prefilled_tokens for twin in twins] == computed
    if mode != "none":
        stats = engine.cache.stats
        assert stats.requests == 4 and stats.query_tokens - stats.hit_tokens == sum(computed)


@pytest.mark.parametrize(("own", "step"), [(11, 2), (12, 1)])
def test_nobody_waits_for_less_than_half_of_what_is_missing(own, step):
    """Of 48 + 12 shared tokens the last 12 can be shared a step later only."""
    engine = make_engine("radix-16")
    requests = [
        engine.add(np.append(PROMPT, np.full(own, last, np.int32)), ANSWER) for last in (100, 200)
    ]
    assert first_tokens(engine, requests) == [1, step]
    assert requests[1].prefilled_tokens == (own if step == 2 else 12 + own)


def test_nobody_waits_twice():
    engine = make_engine("radix-64")
    first = engine.add(np.append(PROMPT[:40], np.int32(7)), ANSWER)
    second = engine.add(PROMPT, ANSWER)
    assert engine.step() == [first]  # 40 of its 60 tokens are in flight, in one page
    third = engine.add(np.append(PROMPT, np.int32(7)), ANSWER)
    engine.scheduler.waiting.rotate(1)
    assert set(engine.step()) == {second, third}  # now 19 of the 20 that it lacks are
    assert (second.prefilled_tokens, third.prefilled_tokens) == (20, 21)


def test_best_of_n_at_page_16_computes_what_it_does_at_page_1():
    workload = generate("best-of-n:questions=20,n=6,answer=1", 0, 1000)
    computed = {}
    for mode in ("radix-1", "radix-16", "hash-16"):
        found = play(workload, Arrivals(concurrency=6), make_engine(mode), StepClock(1.0))
        computed[mode] = sum(outcome.computed_tokens for outcome in found)
        ttfts = {outcome.ttft for outcome in found}
        assert ttfts == ({1.0, 2.0} if mode == "radix-16" else {1.0})
    assert computed["radix-16"] == computed["radix-1"] < computed["hash-16"]
