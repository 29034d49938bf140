"""Random workloads, played at the index level."""

from __future__ import annotations

from random import Random

import numpy as np

from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.scheduler import Scheduler


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
    for _ in range(40):
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
        together = rng.random() < 0.2
        index = workload.add(parts, answer, after=after, together=together, template=1, stem=2)
        chats[at] = ([*parts, answer], index)
        if sum(map(len, parts)) > 150:
            del chats[at]
    return workload


def run(workload, cache, *, concurrency=4, budget=64, policy="fcfs", checked=None):
    engine = IndexEngine(Scheduler(cache, budget, 8, policy))
    cache.coming = lambda: ()  # the brute force knows the order of use alone
    check = cache.check if checked is None else checked
    return play(workload, Arrivals(concurrency=concurrency), engine, StepClock(1.0), check)


def outcomes(found):
    return [
        (o.hit_tokens, o.computed_tokens, o.preemptions, o.step, o.error is None) for o in found
    ]
