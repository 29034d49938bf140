"""Who runs next: what waits for a page in flight, and how clients share an engine.

All waits are counted in steps.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from math import nan
from unittest.mock import Mock

import numpy as np
import pytest

from radixcache import PinError, SamplingParams
from radixcache.bench.replay.play import IndexEngine
from radixcache.bench.schemes.named import parse_scheme
from radixcache.errors import OutOfPages
from radixcache.runtime.engine.scheduling.admission import LOOK_AHEAD, MAX_SKIPS
from radixcache.runtime.engine.scheduling.fairness import MAX_WAIT
from radixcache.runtime.engine.scheduling.scheduler import DECODE_AHEAD, Scheduler
from radixcache.runtime.request import Request
from tests.helpers.cover import seeds

PROMPT = np.arange(60, dtype=np.int32)
ANSWER = np.arange(1000, 1003, dtype=np.int32)


def make_engine(mode: str, policy: str = "fcfs") -> IndexEngine:
    return IndexEngine(Scheduler(parse_scheme(mode).make(4096), 512, 16, policy))  # type: ignore[arg-type]


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


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
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


@pytest.mark.parametrize("free", range(5, 33))
def test_a_decode_of_several_tokens_gets_pages_for_all_of_them_or_none(free):
    engine = make_engine("radix-4")
    params = SamplingParams(max_tokens=200)
    request = Request(0, None, PROMPT, params)
    request.add_sequences(200, None)
    (sequence,) = request.sequences
    engine.scheduler.add(sequence)
    engine.scheduler.schedule()
    cache = engine.cache
    cache.commit()
    others = cache.acquire(PROMPT[::-1].copy())
    cache.reserve(others, 4 * (cache.pool.num_free - free))
    if free < 10:
        with pytest.raises(OutOfPages):
            engine.scheduler.reserve_decode(sequence, 40)
    else:
        engine.scheduler.reserve_decode(sequence, 40)
        assert sequence.lease is not None and sequence.lease.capacity >= len(PROMPT) + 40
    cache.check()


@seeds(20_261_127, 20)
def test_who_waits_for_pages_is_admitted_as_if_it_were_tried_in_each_step(seed):
    """Whatever is published, released, or unpinned meanwhile; and it is not tried in each step."""
    tries = Counter[bool]()
    for run in range(6):
        admitted = []
        for restless in (False, True):
            rng = random.Random(f"{seed} {run}")
            cache = parse_scheme(f"{rng.choice(['radix', 'hash'])}-{rng.choice([4, 16])}").make(700)
            if restless:
                cache.changes = nan  # type: ignore[assignment]  # never what it was
            engine = IndexEngine(Scheduler(cache, rng.choice([20, 512]), 16, "lpm"))
            find = Mock(wraps=cache.acquire)
            cache.acquire = find  # type: ignore[method-assign]
            stems = [np.array([stem, *range(1000, 1200)], np.int32) for stem in range(3)]
            live, steps = list[Request](), []
            for step in range(900):
                if rng.random() < 0.05:
                    stem, own = rng.choice(stems)[: rng.randint(1, 200)], 2000 + step
                    prompt = np.append(stem, np.full(rng.randint(1, 90), own, np.int32))
                    answer = np.zeros(rng.randint(1, 150), np.int32)
                    live.append(engine.add(prompt, answer, rng.choice("ab")))
                if rng.random() < 0.02 and cache.pins:
                    cache.unpin("a stem")
                elif rng.random() < 0.02 and not cache.pins:
                    with suppress(PinError):
                        cache.pin("a stem", rng.choice(stems)[: rng.randint(1, 60)])
                engine.step()
                steps.append([r.admitted is not None for r in live])
            admitted.append((steps, engine.scheduler.num_preemptions))
            tries[restless] += find.call_count
        assert admitted[0] == admitted[1], f"run {run}"
    assert 3 * tries[False] < 2 * tries[True]


def test_who_is_tried_in_vain_does_not_let_others_reserve_far_ahead():
    """Each such reservation would fail, again and again, until pages are few enough."""
    engine = make_engine("radix-4")
    for start in range(3):
        engine.add(np.full(1250, start, np.int32), np.zeros(200, np.int32))
    for step in range(50):
        engine.step()
        if step > 10:
            engine.add(np.full(2000, step, np.int32), ANSWER)  # for which there is no room
    assert engine.scheduler._ahead < DECODE_AHEAD and not engine.scheduler.num_preemptions


# ------------------------------------------------------------------------------ one against all


class Shared:
    """An engine for several clients that only counts; notes the steps of first and last tokens."""

    def __init__(self, slots: int, *, kv_tokens: int = 1 << 16, budget: int = 2048) -> None:
        cache = parse_scheme("radix-16").make(kv_tokens)
        self.engine = IndexEngine(Scheduler(cache, budget, slots, "lpm"))
        self.scheduler = self.engine.scheduler
        self.steps = 0
        self.began: dict[Request, int] = {}
        self.ended: dict[Request, int] = {}
        self._tokens = 0

    def ask(self, client: str, count: int = 1, *, prompt: int = 30, answer: int = 400):
        """`count` requests, whose prompts share nothing."""
        requests = []
        for _ in range(count):
            tokens = np.arange(self._tokens, self._tokens + prompt, dtype=np.int32)
            self._tokens += prompt
            requests.append(self.engine.add(tokens, np.zeros(answer, np.int32), client))
        return requests

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.steps += 1
            for request in self.engine.step():
                self.began.setdefault(request, self.steps)
                if request.finished:
                    self.ended[request] = self.steps
            self.engine.cache.check()

    def finish(self, *requests: Request) -> None:
        while not all(request.finished for request in requests):
            self.step()
            assert self.steps < 20_000

    def running(self) -> Counter[str]:
        """How many sequences of each client run."""
        return Counter(str(s.request.client) for s in self.scheduler.running)


def test_a_short_request_does_not_wait_for_another_client_that_holds_all_slots():
    shared = Shared(slots=64)
    greedy = shared.ask("a", 64)
    shared.step(50)
    assert shared.running() == {"a": 64}
    (short,) = shared.ask("b", answer=5)
    shared.finish(short)
    assert (shared.began[short], shared.ended[short]) == (51, 55)
    shared.finish(*greedy)
    # One of 64 was put back, and computed no more again than the last token that it had.
    assert sum(request.sequences[0].preemptions for request in greedy) == 1
    assert sum(request.prefilled_tokens for request in greedy) == 64 * 30 + 1
    assert shared.steps <= 400 + 5 + 1


def test_among_clients_with_one_slot_for_all_the_one_that_got_least_is_next():
    shared = Shared(slots=1)
    shared.ask("a", 60, prompt=300, answer=1)
    shared.ask("b", 600, prompt=30, answer=1)
    tokens: Counter[str] = Counter()
    for _ in range(200):
        shared.step()
        tokens.clear()
        for request in shared.ended:
            tokens[str(request.client)] += request.prefilled_tokens
        assert abs(tokens["a"] - tokens["b"]) <= 300
    assert min(tokens.values()) > 5000


def test_clients_that_come_and_go_keep_nobody_waiting():
    """Whoever has just come owes nothing, but nobody else does more for having been there."""
    shared = Shared(slots=1)
    patient = shared.ask("a", 10, answer=3)
    others = [shared.ask(name, answer=3)[0] for name in "bcd"]
    while not all(request.finished for request in patient):
        shared.step()
        others = [shared.ask(str(r.client), answer=3)[0] if r.finished else r for r in others]
    ends = [shared.ended[request] for request in patient]
    # Each takes three steps and is followed by three others at most, which take three each.
    assert max(np.diff(ends)) <= 4 * 3


@pytest.mark.parametrize(("prompt", "most"), [(30, 9), (2000, MAX_WAIT + 4)])
def test_a_client_that_comes_back_does_not_starve_beside_clients_that_come_once(prompt, most):
    shared, names = Shared(slots=1), map(str, range(1000))

    def go_on(until: Request) -> int:
        before = len(shared.ended)
        while not until.finished:
            for _ in range(3 - len({s.request.client for s in shared.scheduler.waiting} - {"a"})):
                shared.ask(next(names), answer=1)
            shared.step()
        return len(shared.ended) - before

    go_on(shared.ask("a", prompt=prompt, answer=3)[0])
    for request in shared.ask("a", 4, answer=3):  # as the sequences of one with n = 4
        assert go_on(request) <= most
    shares = shared.scheduler._shares
    assert len(shares._served) <= 4 and len(shares._gone) <= 12


def test_a_share_of_the_pages_comes_with_a_share_of_the_slots():
    """Here it is not slots that another client has taken all of, but pages."""
    shared = Shared(slots=64, kv_tokens=4000)
    greedy = shared.ask("a", 64, prompt=40, answer=200)
    shared.step(100)
    assert shared.running()["a"] < 64 and shared.engine.cache.pool.num_free < 8
    for _ in range(5):
        (short,) = shared.ask("b", prompt=100, answer=20)
        arrived = shared.steps
        shared.finish(short)
        assert shared.began[short] - arrived <= 10
        assert shared.ended[short] - arrived <= 40
    shared.finish(*greedy)
    assert all(request.error is None for request in greedy)


def test_every_waiting_request_ages():
    """However many come that would hit more: each that waits is overtaken only so many times."""
    engine = make_engine("radix-16", "lpm")
    engine.scheduler.max_num_seqs = 1
    stem = np.arange(64, dtype=np.int32)
    answer = np.zeros(1, np.int32)
    own = iter(range(100_000, 200_000))

    def ask(*start: int) -> Request:
        return engine.add(np.array([*start, next(own)], np.int32), answer)

    ask(*stem)
    engine.step()
    waiting = [ask(-1 - i) for i in range(8)]
    overtaken = dict.fromkeys(waiting, 0)
    others = {ask(*stem) for _ in range(LOOK_AHEAD)}
    while overtaken.keys() - {r for r in waiting if r.finished}:
        (done,) = engine.step()
        if done in others:
            others.remove(done)
            others.add(ask(*stem))
            for request in waiting:
                overtaken[request] += not request.finished
    assert 0 < max(overtaken.values()) <= MAX_SKIPS
    assert [request.finished for request in waiting] == [True] * 8


# ------------------------------------------------------------------------- one long prompt


@pytest.mark.parametrize("client", ["a", "b"])
def test_a_long_prompt_stops_nobody(client):
    """Who comes while it is in prefill has its first token in the next step."""
    shared = Shared(slots=64, budget=64)
    (long,) = shared.ask("a", prompt=4000, answer=1)
    shared.step(3)
    arrived = {}
    for _ in range(10):
        (short,) = shared.ask(client, prompt=20, answer=2)
        arrived[short] = shared.steps
        shared.step(2)
    shared.finish(long, *arrived)
    assert all(shared.began[short] - step == 1 for short, step in arrived.items())
    assert shared.ended[long] <= 4000 // 64 + 10, "and hardly takes longer"


def test_the_shortest_rest_ends_first_and_the_longest_goes_on():
    shared = Shared(slots=64, budget=64)
    requests = []
    for length in (8000, 3000, 1000, 300):
        requests += shared.ask("a", prompt=length, answer=1)
        shared.step(2)
    (equal,) = shared.ask("b", prompt=7000, answer=1)  # not beside one that is as long
    done = [request.prefilled_tokens for request in requests]
    shared.step(4)
    assert all(r.finished or r.prefilled_tokens > n for r, n in zip(requests, done, strict=True))
    assert equal.admitted is None
    shared.finish(*requests, equal)
    ends = [shared.ended[request] for request in [*requests, equal]]
    assert ends[3] < ends[2] < ends[1] < ends[0] < ends[4]


def test_no_half_of_a_step_is_kept_for_a_prompt_that_may_not_begin():
    shared = Shared(slots=64, budget=64)
    first, second = shared.ask("a", 2, prompt=4000, answer=1)
    (other,) = shared.ask("b", prompt=3000, answer=1)
    shared.finish(first, second, other)
    assert max(shared.ended.values()) <= 11_000 // 64 + 3
    assert shared.ended[first] <= 4000 // 64 + 1


def test_short_prompts_without_end_starve_no_long_one():
    shared = Shared(slots=64, budget=64)
    long = shared.ask("a", prompt=4000, answer=1) + shared.ask("b", prompt=4000, answer=1)
    while not all(request.finished for request in long):
        shared.ask("c", 2, prompt=30, answer=1)
        shared.step()
        assert shared.steps < 3 * 8000 // 64


def test_nobody_computes_what_a_long_prompt_is_about_to_compute():
    engine = IndexEngine(Scheduler(parse_scheme("radix-16").make(1 << 16), 64, 16, "lpm"))
    stem = np.arange(2000, dtype=np.int32)
    requests = []
    for own, length in enumerate([6000, 20, 20, 20, 20]):  # the others are much shorter
        requests.append(engine.add(np.append(stem, np.full(length, 5000 + own, np.int32)), ANSWER))
        engine.step()
    short = engine.add(np.full(20, 9000, np.int32), ANSWER)
    engine.step()
    assert short.admitted is not None
    while engine.has_work:
        engine.step()
    assert sum(request.prefilled_tokens for request in requests) <= 8000 + 4 * (20 + 64)
