"""Several replicas behind one router, simulated: what routing alone makes of a workload.

A replica computes prompts one after the other at a fixed rate, in order of arrival, and decodes at
a fixed rate whatever else it does. Its cache is a real one, of any scheme; before its prefill a
request takes a slot, and room for its prompt and its whole answer, and waits if there is none.
There is no network, no batch and no preemption: this tells where requests go, and what they find.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any
from zlib import crc32

import numpy as np

from radixcache.base import PrefixCache
from radixcache.bench.replay.play import Arrivals, Queue
from radixcache.bench.schemes.named import Scheme
from radixcache.bench.schemes.routing import RULES, Asked
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import OutOfPages
from radixcache.lease import Lease
from radixcache.runtime.router.policy import Router

_SESSION = 1024
"""Tokens by which prompts are told apart that belong to no conversation."""


@dataclass(frozen=True)
class Fleet:
    """The replicas, all alike.

    Attributes:
        prefill_rate: prompt tokens that one computes in a second.
        step_time: seconds from one token of an answer to the next.
        max_num_seqs: requests that one has begun and not ended.
    """

    replicas: int
    prefill_rate: float = 8192
    step_time: float = 0.025
    max_num_seqs: int = 64


@dataclass
class RoutingFigures:
    """One way of routing on one workload.

    Attributes:
        memory_tokens: tokens that the pages of each replica hold.
        refused: requests that could not fit; in no other figure.
        hit_tokens, computed_tokens: prompt tokens that were cached when their prefill began, and
            those that were computed.
        ttfts: seconds from when each request was due to its first token, in their order.
        computed_by_replica: prompt tokens that each computed.
    """

    workload: str
    routing: str
    scheme: str
    memory: str
    memory_tokens: int
    refused: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    ttfts: list[float] = field(default_factory=list, repr=False)
    computed_by_replica: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.hit_tokens + self.computed_tokens)

    @property
    def ttft_mean(self) -> float:
        return float(np.mean(self.ttfts or [0.0]))

    @property
    def ttft_p99(self) -> float:
        return float(np.percentile(self.ttfts or [0.0], 99))

    @property
    def imbalance(self) -> float:
        """Tokens that the busiest replica computed, by the mean."""
        return max(self.computed_by_replica) / max(1.0, float(np.mean(self.computed_by_replica)))

    def to_json(self) -> dict[str, Any]:
        names = ("hit_rate", "ttft_mean", "ttft_p99", "imbalance")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


@dataclass
class _Job:
    index: int
    due: float
    prompt: Tokens
    replica: _Replica
    lease: Lease | None = None


@dataclass(eq=False)
class _Replica:
    cache: PrefixCache
    waiting: deque[_Job] = field(default_factory=deque)
    prefilling: bool = False
    running: int = 0
    computed_tokens: int = 0


def run_replicas(
    workload: Workload,
    routing: str,
    scheme: Scheme,
    memory_tokens: int,
    fleet: Fleet,
    arrivals: Arrivals,
    *,
    memory: str = "",
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> RoutingFigures:
    """Play a workload on replicas, each with `memory_tokens` of KV, under one of `RULES`."""
    figures = RoutingFigures(workload.name, routing, scheme.name, memory, memory_tokens)
    replicas: dict[Hashable, _Replica] = {
        n: _Replica(scheme.make(memory_tokens, workload)) for n in range(fleet.replicas)
    }
    _Simulation(workload, figures, fleet, arrivals, replicas, Random(f"{seed}")).run(progress)
    figures.computed_by_replica = [replica.computed_tokens for replica in replicas.values()]
    figures.computed_tokens = sum(figures.computed_by_replica)
    return figures


class _Simulation:
    """What happens when, on the clock `now`."""

    def __init__(
        self,
        workload: Workload,
        figures: RoutingFigures,
        fleet: Fleet,
        arrivals: Arrivals,
        replicas: dict[Hashable, _Replica],
        random: Random,
    ) -> None:
        self.arrivals, self.queue = workload.arrivals, Queue(workload, arrivals)
        self.figures, self.fleet, self.replicas, self.random = figures, fleet, replicas, random
        self.router = Router()
        for name in replicas:
            self.router.add(name, figures.memory_tokens, fleet.max_num_seqs)
        self.is_chat = any(arrival.turn for arrival in workload.arrivals)
        self.sessions: dict[int, int] = {}
        self.ttfts: dict[int, float] = {}
        self.now = 0.0
        self.in_flight = self.count = 0
        self.events: list[tuple[float, int, Callable[[_Job], None], _Job]] = []

    def run(self, progress: Callable[[], object]) -> None:
        queue, events = self.queue, self.events
        while True:
            while coming := queue.take(self.now, self.in_flight):
                self.come(*coming)
                progress()
            due = queue.next_due
            if due is not None and due > self.now and not (events and events[0][0] <= due):
                self.now = due
            elif events:
                self.now, _, happen, job = heapq.heappop(events)
                happen(job)
            else:
                break
        assert not self.in_flight, "a request waits for ever"
        self.figures.ttfts = [self.ttfts[index] for index in sorted(self.ttfts)]

    def after(self, seconds: float, happen: Callable[[_Job], None], job: _Job) -> None:
        self.count += 1  # so that jobs are not compared
        heapq.heappush(self.events, (self.now + seconds, self.count, happen, job))

    def come(self, index: int, due: float) -> None:
        """A request arrives: choose its replica, and queue it there."""
        arrival, pool = self.arrivals[index], self.replicas[0].cache.pool
        if arrival.kv_tokens > (pool.num_pages - 1) * pool.page_size:
            self.figures.refused += 1
            self.queue.ended(index, self.now)
            return
        prompt = arrival.prompt()
        asked = Asked(self.router.standings(prompt), self.session(index, prompt), self.random)
        name = RULES[self.figures.routing](asked).replica
        self.router.book(index, name, prompt)
        replica = self.replicas[name]
        replica.waiting.append(_Job(index, due, prompt, replica))
        self.in_flight += 1
        self.begin(replica)

    def session(self, index: int, prompt: Tokens) -> int:
        """By the conversation's first prompt; in a trace without any, by how the prompt begins."""
        arrival = self.arrivals[index]
        if arrival.turn and arrival.after is not None:
            found = self.sessions[arrival.after]
        else:
            found = crc32((prompt if self.is_chat else prompt[:_SESSION]).tobytes())
        self.sessions[index] = found
        return found

    def begin(self, replica: _Replica) -> None:
        """Let the next prompt be computed, if nobody's is and there is a slot and room for it."""
        is_full = replica.running >= self.fleet.max_num_seqs
        if replica.prefilling or is_full or not replica.waiting:
            return
        job, cache = replica.waiting[0], replica.cache
        lease = cache.acquire(job.prompt)
        try:
            cache.reserve(lease, self.arrivals[job.index].kv_tokens)
        except OutOfPages:
            cache.release(lease)  # until another request ends there
            return
        replica.waiting.popleft()
        replica.prefilling, job.lease = True, lease
        replica.running += 1
        to_compute = len(job.prompt) - lease.cached_tokens
        replica.computed_tokens += to_compute
        self.figures.hit_tokens += lease.cached_tokens
        cache.publish(lease, job.prompt[lease.num_tokens :])
        lease.take_copies()
        cache.commit()
        self.after(to_compute / self.fleet.prefill_rate, self.start, job)

    def start(self, job: _Job) -> None:
        self.ttfts[job.index] = self.now - job.due
        self.router.started(job.index)
        job.replica.prefilling = False
        decoded = self.arrivals[job.index].answer_tokens - 1
        self.after(decoded * self.fleet.step_time, self.end, job)
        self.begin(job.replica)

    def end(self, job: _Job) -> None:
        answer, cache = self.arrivals[job.index].answer(), job.replica.cache
        assert job.lease is not None
        if len(answer) > 1:
            cache.publish(job.lease, answer[:-1])
            cache.commit()
        cache.release(job.lease)
        self.router.release(job.index, answer)
        self.in_flight -= 1
        job.replica.running -= 1
        self.queue.ended(job.index, self.now)
        self.begin(job.replica)
