"""The index level against brute force, request by request."""

from __future__ import annotations

import numpy as np

from radixcache import RadixCache
from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.schemes.named import GROUPS, parse_scheme
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from tests.bench.model import BruteUnits
from tests.bench.replay.random_play import outcomes, random_workload, run
from tests.helpers.cover import covering


def exact(cache):
    """Make a radix cache evict what follows a lease's cursor in its turn.

    `RadixCache` splits such an edge only when nothing else is left to evict, or for the lease that
    asks. That is the one point in which it is not exactly LRU, and the brute force is.
    """
    tree = getattr(cache, "tree", cache)
    if isinstance(tree, RadixCache):
        allocate = tree._allocate

        def expose_and_allocate(count, lease):
            if count > tree.pool.num_free:
                tree._expose_tails()
            return allocate(count, lease)

        setattr(tree, "_allocate", expose_and_allocate)  # noqa: B010 (mypy minds the other way)
    return cache


SCHEMES = ["radix-1", "aligned-4", "aligned-16"]


@covering(seed=range(6), scheme=SCHEMES, memory=[192, 320, 640, 4096])
def test_hits_are_those_of_a_brute_force_simulation(seed, scheme, memory):
    workload = random_workload(seed)
    scheme = parse_scheme(scheme)
    concurrency = 1 + seed % 4
    brute = BruteUnits(memory, scheme.page_size)
    expected = outcomes(run(workload, brute, concurrency=concurrency, checked=lambda: None))
    found = outcomes(run(workload, exact(scheme.make(memory)), concurrency=concurrency))
    assert found == expected, f"seed {seed}, {scheme.name}, {memory} tokens"


def test_a_closed_loop_has_as_many_in_flight_as_it_may():
    workload = generate("short:requests=40", 0, 1000)
    engine = IndexEngine(Scheduler(parse_scheme("radix-1").make(1 << 16), 4096, 64, "fcfs"))
    in_flight = []

    class Counting(StepClock):
        def tick(self):
            in_flight.append(len(engine._answers))
            super().tick()

    play(workload, Arrivals(concurrency=7), engine, Counting(1.0))
    assert max(in_flight) == in_flight[0] == 7


def test_a_burst_comes_at_one_moment_and_rates_are_kept():
    workload = generate("bursts:bursts=400,size=3", 0, 5000)
    due = Arrivals(rate=10.0, seed=5).due(workload)
    assert all(len(set(due[start : start + 3])) == 1 for start in range(0, 1200, 3))
    assert due == sorted(due) and 30 < due[-1] < 50  # 400 bursts at 10 a second


def test_a_turn_waits_for_the_turn_before_it():
    workload = generate("chat:conversations=3,turns=5", 0, 1000)
    engine = IndexEngine(Scheduler(parse_scheme("radix-1").make(1 << 16), 512, 64, "fcfs"))
    found = play(workload, Arrivals(rate=1e6), engine, StepClock(1.0))
    for arrival, outcome in zip(workload.arrivals, found, strict=True):
        if arrival.after is not None:
            before = found[arrival.after]
            assert outcome.step >= before.step + workload.arrivals[arrival.after].answer_tokens
            assert (
                outcome.ttft is not None and outcome.ttft < 20
            )  # from when it could come, not from the first turn's time


def test_a_request_that_can_never_fit_is_refused_and_the_others_go_on():
    workload = Workload("large", "")
    large = workload.add([np.arange(600, dtype=np.int32)], np.arange(3, dtype=np.int32))
    workload.add([np.arange(50, dtype=np.int32)], np.arange(3, dtype=np.int32), after=large)
    for name in GROUPS["all"]:
        refused, served = run(workload, parse_scheme(name).make(512))
        assert "602 tokens do not fit" in refused.error and refused.ttft is None
        assert served.error is None and served.computed_tokens == 50
