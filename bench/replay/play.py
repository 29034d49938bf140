"""Plays a workload on an engine: sends its requests when they are due, and notes their outcomes.

Both levels of the benchmark run through `play`, and both are driven by the runtime's own scheduler,
so that they decide alike, request by request. At index level the engine is `IndexEngine`, which has
no model; at engine level it is the `ScriptedEngine` of `engine_level.py`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from radixcache.base import PrefixCache
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.params import SamplingParams


class ReplayEngine(Protocol):
    """The engine of a replay, which knows what each request will generate."""

    cache: PrefixCache

    @property
    def has_work(self) -> bool: ...

    def add(self, prompt: Tokens, answer: Tokens) -> Request: ...

    def step(self) -> list[Request]: ...


@dataclass
class Outcome:
    """The outcome of one request.

    Attributes:
        prompt_tokens, turn: as in its `Arrival`.
        hit_tokens: found in the cache when it was first admitted.
        recomputed_tokens: prompt tokens whose KV was there then, but no recurrent state.
        computed_tokens: prompt tokens prefilled, again after a preemption included.
        step: the engine's steps before it came.
        ttft: seconds from when it was due, on the clock of the run; None if it failed.
        error: why it was refused or failed.
    """

    prompt_tokens: int
    turn: int
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    step: int = 0
    ttft: float | None = None
    error: str | None = None


class WallClock:
    """The time of a run, in seconds from its start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def tick(self) -> None:
        """A step has run."""

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class StepClock(WallClock):
    """Time without a model: every step lasts the same."""

    def __init__(self, step_time: float) -> None:
        self.step_time = step_time
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def tick(self) -> None:
        self._now += self.step_time

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


@dataclass(frozen=True)
class Arrivals:
    """When the requests of a workload come; exactly one way is meant.

    Attributes:
        concurrency: closed loop: a request comes as soon as fewer than this many are in flight, in
            the workload's order, but for those that wait for one before.
        rate: Poisson: this many requests, or bursts, a second, in the workload's order.
        as_recorded: at the times that the workload has, `speed` times as fast.
    """

    concurrency: int | None = None
    rate: float | None = None
    as_recorded: bool = False
    seed: int = 0
    speed: float = 1.0

    def __str__(self) -> str:
        if self.as_recorded:
            return "as recorded" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")
        if self.rate is not None:
            return f"Poisson, {self.rate} a second"
        return f"closed loop of {self.concurrency}"

    def due(self, workload: Workload) -> list[float]:
        """The moment at which each request is due, if it waits for no other."""
        if self.as_recorded:
            return [arrival.at / self.speed for arrival in workload.arrivals]
        if self.rate is None:
            return [0.0] * len(workload.arrivals)
        rng = np.random.default_rng(self.seed)
        gaps = rng.exponential(1 / self.rate, len(workload.arrivals))
        gaps[[arrival.together for arrival in workload.arrivals]] = 0.0
        return [float(moment) for moment in gaps.cumsum()]


class Queue:
    def __init__(self, workload: Workload, arrivals: Arrivals) -> None:
        self._due = arrivals.due(workload)
        self._most = arrivals.concurrency
        self._ready: list[tuple[float, int]] = []
        self._blocked: dict[int, list[int]] = {}
        for index, arrival in enumerate(workload.arrivals):
            if arrival.after is None:
                self._ready.append((self._due[index], index))
            else:
                self._blocked.setdefault(arrival.after, []).append(index)
        heapq.heapify(self._ready)

    def take(self, now: float, in_flight: int) -> tuple[int, float] | None:
        """The next request that comes now and when it was due, if there is one. O(log n)."""
        if not self._ready or self._ready[0][0] > now:
            return None
        if self._most is not None and in_flight >= self._most:
            return None
        due, index = heapq.heappop(self._ready)
        return index, due if self._most is None else now

    def ended(self, index: int, now: float) -> None:
        """Those that waited for request `index` may come. O(log n) each."""
        for follower in self._blocked.pop(index, ()):
            due = self._due[follower]  # in a closed loop only their order counts
            heapq.heappush(self._ready, (due if self._most else max(now, due), follower))

    @property
    def next_due(self) -> float | None:
        """When the next one comes, if no other has to end before."""
        return self._ready[0][0] if self._ready else None


def play(
    workload: Workload,
    arrivals: Arrivals,
    engine: ReplayEngine,
    clock: WallClock,
    progress: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Run a whole workload; returns the outcomes in the order of its requests.

    A request that could never fit the pool is refused when it comes, as the runtime does.

    Args:
        progress: called whenever a request has ended.
    """
    queue = Queue(workload, arrivals)
    outcomes: list[Outcome] = [Outcome(a.prompt_tokens, a.turn) for a in workload.arrivals]
    open_requests: dict[Request, tuple[int, float]] = {}
    # A branch in mid-page holds one page twice for a moment, so the runtime keeps one to spare.
    room = (engine.cache.pool.num_pages - 1) * engine.cache.page_size
    steps = 0

    def send(index: int, due: float) -> None:
        arrival, outcome = workload.arrivals[index], outcomes[index]
        outcome.step = steps
        if arrival.kv_tokens > room:
            outcome.error = f"{arrival.kv_tokens} tokens do not fit {room}"
            end(index)
        else:
            open_requests[engine.add(arrival.prompt(), arrival.answer())] = (index, due)

    def end(index: int) -> None:
        queue.ended(index, clock.now())
        progress()

    while True:
        while found := queue.take(clock.now(), len(open_requests)):
            send(*found)
        if not engine.has_work:
            moment = queue.next_due
            if moment is None:
                return outcomes
            clock.wait_until(moment)
            continue
        changed = engine.step()
        steps += 1
        clock.tick()
        for request in changed:
            index, due = open_requests[request]
            outcome = outcomes[index]
            if outcome.ttft is None and request.error is None:
                outcome.ttft = clock.now() - due
            if request.finished:
                del open_requests[request]
                (sequence,) = request.sequences
                outcome.hit_tokens = sequence.cached_tokens
                outcome.recomputed_tokens = sequence.num_recomputed
                outcome.computed_tokens = request.prefilled_tokens
                outcome.preemptions = sequence.preemptions
                outcome.error = request.error
                end(index)


class IndexEngine:
    """The runtime's scheduler and a cache, without a model: a step costs what these two cost.

    What a request generates is known beforehand. KV exists in no other way than as a page number.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self._answers: dict[Request, Tokens] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, prompt: Tokens, answer: Tokens, client: Hashable = None) -> Request:
        """Queue a request that will generate `answer`."""
        params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
        request = Request(0, None, prompt, params, client=client)
        request.add_sequences(len(answer), None)
        self.scheduler.add(request.sequences[0])
        self._answers[request] = answer
        return request

    def step(self) -> list[Request]:
        """Run a step; returns the requests that got their first token or ended."""
        chunks = self.scheduler.schedule()
        changed = self.scheduler.take_failed()
        self.scheduler.commit()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.lease is not None:
                sequence.lease.take_copies()
                sequence.lease.take_window_copies()
            if chunk.is_last:
                request = sequence.request
                answer = self._answers[request]
                count = len(sequence.generated)
                sequence.append(int(answer[count]))
                if count + 1 == len(answer):
                    self.scheduler.finish(sequence, "length")
                if count == 0 or count + 1 == len(answer):
                    changed.append(request)
        for request in changed:
            if request.finished:
                del self._answers[request]
        return changed
