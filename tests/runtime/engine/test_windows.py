"""Windows that are kept apart: a hit goes on from a checkpoint, and no token differs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from radixcache import LLM, SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.model.kv_pool import WindowLayout
from tests.helpers.cover import seeds
from tests.helpers.engines import finish
from tests.helpers.hash_model import VOCAB, greedy, hash_engine
from tests.helpers.models import tiny_model
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


def ask(engine: Engine, prompt: list[int]) -> int:
    """The cached tokens of a prompt whose answer is right."""
    request = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
    finish(engine)
    assert request.sequences[0].generated.tolist() == greedy(prompt, 2)
    return request.sequences[0].cached_tokens


@pytest.mark.parametrize("cut", [5, 16, 37, 60])
def test_inside_a_first_window_a_prompt_goes_on_from_anywhere(cut: int) -> None:
    """On a grid of 16 tokens."""
    engine = hash_engine(page_size=4, windows=WindowLayout(64, 3, (True, False)))
    rng = random.Random(cut)
    stem = [rng.randrange(VOCAB) for _ in range(60)]
    assert ask(engine, stem) == 0
    other = [*stem[:cut], (stem[cut % 60] + 1) % VOCAB, 1]
    assert ask(engine, other) == (60 if cut == 60 else cut // 16 * 16)


def test_beyond_a_window_the_second_prompt_leaves_a_checkpoint_for_the_third() -> None:
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(100)]
    assert ask(engine, stem) == 0
    assert ask(engine, [*stem[:50], 27, 1]) == 0
    assert ask(engine, [*stem[:50], 26, 2]) == 50
    assert ask(engine, stem) == 100, "its last logits are kept, and the window before"
    assert ask(engine, [*stem, 5]) == 100


def test_the_start_says_how_windows_are_kept(tmp_path: Path) -> None:
    model = tiny_model(
        "gemma3_text", tmp_path / "model", sliding_window=32, max_position_embeddings=512
    )
    for more, told in (
        ({}, " a sequence (window "),
        ({"kv_dir": tmp_path / "kv", "kv_dir_size": "1MB"}, ", in layers with a window too"),
    ):
        with LLM(model, kv_cache_memory_bytes="8MB", **more) as llm:
            assert told in llm.notes[1]
