"""The bounds against brute force over tuples, and against replays."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest

from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.schemes.bounds import build_trie, optimal_hits, unlimited_hits
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from tests.bench.replay.random_play import random_workload

SEEDS = range(8)


def sequences(workload):
    """Prompt and what gets KV of each request, as tuples."""
    return [(tuple(a.prompt().tolist()), tuple(a.tokens().tolist())) for a in workload.arrivals]


def prefixes(tokens):
    return [tokens[:end] for end in range(1, len(tokens) + 1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_footprint_and_unlimited_hits_are_those_of_a_set_of_prefixes(seed):
    workload = random_workload(seed)
    known, hits = set(), 0
    for prompt, tokens in sequences(workload):
        hits += sum(prefix in known for prefix in prefixes(prompt[:-1]))
        known.update(prefixes(tokens))
    trie = build_trie(workload)
    assert trie.footprint == len(known), f"seed {seed}"
    assert unlimited_hits(trie) == hits, f"seed {seed}"


def best_by_search(requests, memory):
    """The most tokens that any eviction at all can hit, one request at a time.

    One that would leave no token of the memory to spare is refused.
    """
    requests = [request for request in requests if len(request[1]) < memory]
    paths = [prefixes(tokens) for _, tokens in requests]

    @cache
    def most(number, resident):
        if number == len(requests):
            return 0
        wanted = set(paths[number])
        hits = sum(prefix in resident for prefix in prefixes(requests[number][0][:-1]))
        return hits + max(
            most(number + 1, kept) for kept in closed_sets(resident | wanted, wanted, memory)
        )

    return most(0, frozenset())


def closed_sets(prefix_set, wanted, room):
    """Every largest set of prefixes, with their own prefixes, that holds `wanted` and fits."""
    if len(prefix_set) <= room:
        return [prefix_set]
    found = set()
    leaves = [p for p in prefix_set if p not in wanted]
    inner = {p[:-1] for p in prefix_set}
    for leaf in leaves:
        if leaf not in inner:
            found.update(closed_sets(prefix_set - {leaf}, wanted, room))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_eviction_at_all_hits_more_than_the_optimum_and_one_hits_as_much(seed):
    """Generated tokens included, which later prompts hit, in the least memory and in more."""
    rng = Random(f"optimum {seed}")
    workload = Workload("tiny", "")
    for _ in range(7):
        prompt = np.array([rng.randrange(2) for _ in range(rng.randint(2, 4))], np.int32)
        said = [rng.randrange(2) for _ in range(rng.randint(1, 3))]
        workload.add([prompt], np.array(said, np.int32))
    memory = rng.randint(workload.longest - 2, workload.longest + 4)  # below: some are left out
    expected = best_by_search(sequences(workload), memory)
    assert optimal_hits(build_trie(workload), memory) == expected, f"seed {seed}"


@pytest.mark.parametrize("scheme", ["hash-4", "radix-1", "radix-4", "whole-4", "aligned-4"])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_request_at_a_time_no_scheme_hits_more_than_the_optimum(seed, scheme):
    """Page size 1 refuses whom the optimum leaves out; where pages are larger, all fit here."""
    workload = random_workload(seed)
    trie = build_trie(workload)
    least = workload.longest + (-20 if scheme == "radix-1" else 8)
    for memory in range(least, trie.footprint, trie.footprint // 3):
        cache = parse_scheme(scheme).make(memory)
        play_one = IndexEngine(Scheduler(cache, 4096, 1, "fcfs"))
        found = play(workload, Arrivals(concurrency=1), play_one, StepClock(1.0))
        cache.check()
        hits = sum(outcome.hit_tokens for outcome in found)
        assert hits <= optimal_hits(trie, memory), f"seed {seed}, {memory} tokens"


def test_a_request_that_does_not_fit_is_left_out_of_the_optimum():
    workload = Workload("large", "")
    small, large = np.arange(5, dtype=np.int32), np.arange(100, 120, dtype=np.int32)
    for prompt in (small, large, small):
        workload.add([prompt], prompt[:1])
    assert optimal_hits(build_trie(workload), 10) == 4
