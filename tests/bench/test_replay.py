"""The index level against brute force, request by request."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from radixcache import RadixCache
from radixcache.bench.modes import parse_mode
from radixcache.bench.replay import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.workload import Workload
from radixcache.runtime.scheduler import Scheduler
from tests.bench.brute_force import BruteForce, BruteHashBlock, BruteNone, BruteUnits

BRUTE = {"none": BruteNone, "hash": BruteHashBlock, "radix": BruteUnits, "aligned": BruteUnits}


def random_workload(seed: int) -> Workload:
    """Chats, repeated prompts and fresh ones over few words, so that much is shared by chance."""
    rng = Random(f"workload {seed}")
    words = rng.choice([2, 3, 50])
    say = lambda most: np.array(  # noqa: E731
        [rng.randrange(words) for _ in range(rng.randint(1, most))], np.int32
    )
    workload = Workload("random", f"seed {seed}")
    stems = [say(40) for _ in range(3)]
    chats: list[tuple[list[np.ndarray], int | None]] = []
    for _ in range(60):
        kind = rng.random()
        if chats and kind < 0.5:
            at = rng.randrange(len(chats))
            parts, after = chats[at]
            parts = [*parts, say(20)]
        elif chats and kind < 0.65:
            parts, after = rng.choice(chats)
            at = len(chats)
            chats.append((parts, after))
        else:
            at, after = len(chats), None
            parts = [rng.choice(stems), say(30)]
            chats.append((parts, None))
        answer = say(12)
        index = workload.add(parts, answer, after=after, together=rng.random() < 0.2)
        chats[at] = ([*parts, answer], index)
        if sum(map(len, parts)) > 150:
            del chats[at]
    return workload


def run(workload, cache, *, concurrency=4, budget=64, policy="fcfs", checked=None):
    engine = IndexEngine(Scheduler(cache, budget, 8, policy))
    check = cache.check if checked is None else checked
    return play(workload, Arrivals(concurrency=concurrency), engine, StepClock(1.0), check)


def outcomes(found):
    return [
        (o.hit_tokens, o.computed_tokens, o.preemptions, o.step, o.error is None) for o in found
    ]


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


MODES = ["none", "hash-4", "hash-16", "radix-1", "aligned-4", "aligned-16"]


@pytest.mark.parametrize("memory", [192, 320, 640, 4096])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_hits_are_those_of_a_brute_force_simulation(seed, mode, memory):
    workload = random_workload(seed)
    mode = parse_mode(mode)
    concurrency = 1 + seed % 4
    brute: BruteForce = BRUTE[mode.kind](memory, mode.page_size)
    expected = outcomes(run(workload, brute, concurrency=concurrency, checked=lambda: None))
    found = outcomes(run(workload, exact(mode.make(memory)), concurrency=concurrency))
    assert found == expected, f"seed {seed}, {mode.name}, {memory} tokens"
