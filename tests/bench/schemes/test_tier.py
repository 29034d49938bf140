"""A tier below the pool hits what one LRU memory of both sizes would."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import numpy as np
import pytest

from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.replay.play import Arrivals
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.workloads.workload import Workload

ALONE = Serving(Arrivals(concurrency=1))


def conversations(seed: int) -> tuple[Workload, list[tuple[list[int], list[int]]]]:
    """Turns of 20 conversations in a random order, and the same as plain lists."""
    rng, ids = Random(seed), np.random.default_rng(seed)
    workload, plain = Workload("talk", "turns in any order"), list[tuple[list[int], list[int]]]()
    system = ids.integers(0, 1000, 50, dtype=np.int32)
    texts = [[system, np.array([1000 + n], np.int32)] for n in range(20)]
    for _ in range(150):
        parts = texts[min(int(rng.expovariate(0.12)), 19)]
        parts.append(ids.integers(0, 1000, rng.randint(1, 30), dtype=np.int32))
        answer = ids.integers(0, 1000, rng.randint(1, 30), dtype=np.int32)
        workload.add(list(parts), answer)
        plain.append((np.concatenate(parts).tolist(), answer.tolist()))
        parts.append(answer)
        if len(parts) > 14:
            del parts[2:]
    return workload, plain


def lru_hits(plain: list[tuple[list[int], list[int]]], capacity: int) -> int:
    """Of a memory of tokens, each known by all before it; the last of a text go first."""
    recent, hits = OrderedDict[int, None](), 0
    for prompt, answer in plain:
        name = 0
        names = [name := hash((name, token)) for token in [*prompt, *answer[:-1]]]
        hit = next((n for n, name in enumerate(names[: len(prompt)]) if name not in recent), None)
        hits += min(len(prompt) - 1, len(prompt) if hit is None else hit)
        for name in reversed(names):
            recent[name] = None
            recent.move_to_end(name)
        while len(recent) > capacity:
            recent.popitem(last=False)
    return hits


@pytest.mark.parametrize(("seed", "times"), [(0, 1), (1, 2), (2, 5)])
def test_both_tiers_hit_what_one_memory_of_both_sizes_would(seed: int, times: int) -> None:
    """Less at most what is on its way up, in both at a time: a text of the longest."""
    workload, plain = conversations(seed)
    longest, pool = max(len(p) + len(a) for p, a in plain), 900
    hits = run_index(workload, parse_scheme(f"radix-1+{times}x"), pool, ALONE).hit_tokens
    whole = (1 + times) * pool
    assert lru_hits(plain, whole - longest) <= hits <= lru_hits(plain, whole + longest)
    alone = run_index(workload, parse_scheme("radix-1"), pool, ALONE).hit_tokens
    assert alone < hits
