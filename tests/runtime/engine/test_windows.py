"""Windows that are kept apart: a hit goes on from a checkpoint, and no token differs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.model.kv_pool import WindowLayout
from tests.helpers.cover import seeds
from tests.helpers.hash_model import VOCAB, greedy, hash_engine
from tests.helpers.traffic import serve


def windowed_engine(rng: random.Random, cache: str | None = None) -> Engine:
    page_size, window = rng.choice([1, 3, 4, 16]), rng.randint(3, 40)
    windows = WindowLayout(window, rng.randint(1, 16), (True, False))
    step, running = rng.choice([3, 7, 30, 64, 300]), rng.choice([1, 2, 4, 8, 8])
    room = 160 // page_size + min(160, window + step) // windows.page_size + 6
    room += rng.choice([0, 0, 5, 40, 800])
    return hash_engine(
        cache or rng.choice(["radix", "radix", "hash-block", "none"]),
        page_size,
        room,
        max_num_batched_tokens=step,
        max_num_seqs=running,
        windows=windows,
    )


@seeds(20_261_127, 60)
def test_random_requests_get_the_tokens_of_their_own_texts(seed: int) -> None:
    """A model of checksums, whose windows tell any token too few, or another's."""
    rng, total = random.Random(seed), Counter[str]()

    def is_right(prompt: list[int], tokens: list[int], count: int) -> bool:
        return tokens == greedy(prompt, count)

    for _ in range(6):
        engine = windowed_engine(rng)
        total += serve(engine, rng, 45, is_right, VOCAB, ignore_eos=False, arrivals=0.2)
        model: Any = engine.model
        assert not model.wrong_windows
        assert not model.unwritten
    print(f"seed {seed}: {dict(total)}")
    if seed == 20_261_127:
        assert total["hits"] > total["finished"] / 12
        assert total["evicted"] > 100
        assert total["preempted"] > 0
