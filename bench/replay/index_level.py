"""The index level: a workload through the real scheduler and caches, without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from radixcache.bench.replay.figures import Figures, summarise
from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.replay.watch import CacheTime, WatchedScheduler
from radixcache.bench.schemes.named import Scheme
from radixcache.bench.schemes.tier import instant_loads
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.admission import Policy

_SURVEYS = 64


@dataclass(frozen=True)
class Serving:
    """How requests come and how the engine serves them; the same for every scheme and level.

    Attributes:
        step_time: seconds that a step lasts at index level, where nothing is computed; it matters
            only if requests come at given times.
        states: slots for the recurrent states of a hybrid model; 0 if it is none.
        speculate: whether a model drafts tokens from earlier texts; engine level only.
    """

    arrivals: Arrivals
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    schedule_policy: Policy = "fcfs"
    step_time: float = 0.025
    states: int = 0
    speculate: bool = False


def run_index(
    workload: Workload,
    scheme: Scheme,
    memory_tokens: int,
    serving: Serving,
    memory: str = "",
    progress: Callable[[], object] = lambda: None,
) -> Figures:
    cache, planner = scheme.make_planned(memory_tokens, serving.states, workload)
    clock = CacheTime(cache)
    scheduler = WatchedScheduler(
        cache,
        serving.max_num_batched_tokens,
        min(serving.max_num_seqs, serving.states - 1 if serving.states else serving.max_num_seqs),
        serving.schedule_policy,
        planner,
        loads=instant_loads(cache),
        survey_every=max(1, len(workload.arrivals) // _SURVEYS),
    )
    start = time.perf_counter()
    outcomes = play(
        workload, serving.arrivals, IndexEngine(scheduler), StepClock(serving.step_time), progress
    )
    figures = summarise(
        outcomes,
        workload,
        scheme,
        memory_tokens,
        memory=memory,
        level="index",
        states=serving.states,
        seconds=time.perf_counter() - start,
    )
    surveys = scheduler.surveys
    figures.cache_us = clock.seconds * 1e6 / figures.requests
    held = sum(s.held_pages * scheme.page_size for s in surveys)
    figures.empty_share = sum(s.empty_slots for s in surveys) / held if held else 0.0
    return figures
