"""Windows that are kept apart: a hit goes on from a checkpoint, and no token differs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixcache import LLM, SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.named_prefixes import NamedPrefixes
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
    engine = hash_engine(
        cache or rng.choice(["radix", "radix", "hash-block", "none"]),
        page_size,
        room,
        max_num_batched_tokens=step,
        max_num_seqs=running,
        windows=windows,
    )
    if rng.random() < 0.5:
        only_by_checkpoints(engine)
    return engine


def only_by_checkpoints(engine: Engine) -> None:
    """As if the windows were too large to be computed again."""
    assert engine.cache.windows is not None
    engine.cache.windows._reach = 0


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


def ask(engine: Engine, prompt: list[int], namespace: str | None = None) -> int:
    """The cached tokens of a prompt whose answer is right."""
    params = SamplingParams(temperature=0, max_tokens=2)
    request = engine.add_request(prompt, params, namespace=namespace)
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


def test_who_looks_inside_a_window_and_is_not_admitted_has_not_used_it() -> None:
    engine = hash_engine(page_size=4, windows=WindowLayout(64, 3, (True, False)))
    ask(engine, [n % 28 for n in range(60)])
    index, tokens = engine.cache.windows, np.array([n % 28 for n in range(60)], np.int32)
    assert index is not None
    found = index.find(tokens, None, 20)
    assert found is not None and found.key.length == 16
    index.release(found)
    assert not any(checkpoint.hits for checkpoint in index._kept.values())
    assert not index._hits.total()


def test_beyond_a_window_the_second_prompt_leaves_a_checkpoint_for_the_third() -> None:
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    only_by_checkpoints(engine)
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(100)]
    assert ask(engine, stem) == 0
    assert ask(engine, [*stem[:50], 27, 1]) == 0
    assert ask(engine, [*stem[:50], 26, 2]) == 50
    assert ask(engine, stem) == 100, "its last logits are kept, and the window before"
    assert ask(engine, [*stem, 5]) == 100


def test_a_small_window_is_computed_again_where_there_is_no_checkpoint() -> None:
    """From 19 tokens before the last page boundary of the full layers, on a page of its own."""
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(100)]
    assert ask(engine, stem) == 0
    assert ask(engine, [*stem[:51], 27, 1]) == (48 - 19) // 3 * 3
    assert ask(engine, [*stem[:51], 26, 2]) == 51, "the one before has left a checkpoint"
    assert ask(engine, [*stem[:60], 27, 1], "salt") == 0


def test_a_window_that_is_not_whole_is_no_checkpoint() -> None:
    """Neither where a message ends in it, nor where the sequence is aborted."""
    engine = hash_engine(
        page_size=4, max_num_batched_tokens=6, windows=WindowLayout(20, 3, (True, False))
    )
    mark, rng = VOCAB - 2, random.Random(2)
    engine.scheduler.planner._mark = np.array([mark], np.int32)  # type: ignore[attr-defined]
    stem = [rng.randrange(VOCAB - 2) for _ in range(60)]
    stem[0] = stem[50] = mark
    ask(engine, stem)
    index = engine.cache.windows
    assert index is not None
    while index.evict():
        pass
    request = engine.add_request([*stem, 1, 2], SamplingParams(temperature=0, max_tokens=2))
    for _ in range(2):
        engine.step()
    (sequence,) = request.sequences
    assert sequence.lease is not None and sequence.lease.window is not None
    assert sequence.num_computed == 39 + 12 > 50 and sequence.lease.window.whole == 60
    engine.abort(request)
    finish(engine)
    assert not index._kept
    assert ask(engine, [*stem, 1, 2]) == 39
    assert all(checkpoint.key.length >= 60 for checkpoint in index._kept.values())


def test_prompts_that_wait_for_a_seat_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up hashes a prompt: 15 ms a step for 32 of 32k tokens."""
    engine = hash_engine(max_num_seqs=1, windows=WindowLayout(20, 3, (True, False)))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for first in range(4):
        engine.add_request([first, *range(20)], params)
    engine.step()
    monkeypatch.setattr(engine.scheduler, "match", None)
    for _ in range(6):
        engine.step()
    monkeypatch.undo()
    assert finish(engine)


def test_a_commit_that_is_cut_off_leaves_its_checkpoints_one_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    index = engine.cache.windows
    assert index is not None

    def cut_off() -> None:
        index._kept.update(index._written)
        raise MemoryError

    stem = [n % 28 for n in range(60)]
    engine.add_request(stem, SamplingParams(temperature=0, max_tokens=2))
    with monkeypatch.context() as patched:
        patched.setattr(index, "commit", cut_off)
        with pytest.raises(MemoryError):
            engine.step()
    finish(engine)
    assert ask(engine, [*stem, 1]) == 60


def test_the_start_says_how_windows_are_kept(tmp_path: Path) -> None:
    model = tiny_model(
        "gemma3_text", tmp_path / "model", sliding_window=32, max_position_embeddings=512
    )
    disk = {"kv_dir": tmp_path / "kv", "kv_dir_size": "1MB"}
    for more, told in (
        ({}, " a sequence (window "),
        (disk, " a sequence (window "),
        ({"max_model_len": 64}, ", in layers with a window too"),
    ):
        with LLM(model, kv_cache_memory_bytes="8MB", **more) as llm:
            assert told in llm.notes[1]


@pytest.mark.parametrize("cache", ["radix", "hash-block"])
def test_a_preferred_prefix_yields_to_every_request_that_fits_without_it(cache: str) -> None:
    """A page holds the tokens of all full layers, or of all with a window."""
    windows = WindowLayout(20, 3, (True, False))
    for length in range(10, 400, 7):
        engine = hash_engine(cache, 4, 60, 16, windows=windows)
        prefixes, rng = NamedPrefixes(engine), random.Random(length)
        stem = [rng.randrange(VOCAB - 1) for _ in range(50)]
        ask(engine, stem)
        prefixes.prefer(stem, 60)
        assert len(engine.cache.pins) == 1
        if length + 2 <= engine.max_model_len:
            prefixes.make_room(length + 2)
            ask(engine, [rng.randrange(VOCAB) for _ in range(length)])


@pytest.mark.parametrize("windows", [None, WindowLayout(20, 3, (True, False))])
def test_an_empty_salt_is_none(windows: WindowLayout | None) -> None:
    engine = hash_engine(num_states=0 if windows else 30, windows=windows)
    prompt = [n % VOCAB for n in range(50)]
    assert ask(engine, prompt, "a") == ask(engine, prompt, "") == 0
    hit = ask(engine, prompt)
    assert hit >= 48
    assert ask(engine, prompt, "") == engine.match(prompt, "") == engine.match(prompt) == hit
    prefixes = NamedPrefixes(engine)
    request = prefixes.prepare("one", prompt, cache_salt="")
    finish(engine)
    prefixes.keep("one", request)
    prefixes.unpin("one", "")
    engine.reset_cache()


@pytest.mark.parametrize("windows", [None, WindowLayout(20, 3, (True, False))])
@pytest.mark.parametrize("pins_again", [True, False])
def test_a_broken_cache_leaves_no_checkpoint_pinned(windows, pins_again) -> None:
    engine = hash_engine(num_states=0 if windows else 30, windows=windows)
    prefixes, prompt = NamedPrefixes(engine), [n % VOCAB for n in range(50)]
    pinned = lambda: engine.scheduler.planner.index._pinned.total()  # type: ignore[attr-defined]  # noqa: E731
    request = prefixes.prepare("one", prompt)
    finish(engine)
    prefixes.keep("one", request)
    engine.cache._inside = True  # as if a change had been cut off
    engine.recover()
    if pins_again:
        ask(engine, prompt)
        prefixes.find("one")
        assert engine.cache.pins and pinned() == 1
    prefixes.unpin("one")
    assert not engine.cache.pins and not pinned()


@pytest.mark.parametrize("length", [60, 64])
@pytest.mark.parametrize("cache", ["radix", "hash-block"])
def test_a_pinned_prefix_keeps_its_window_under_any_pressure(cache: str, length: int) -> None:
    engine, rng = (
        hash_engine(cache, 8, 60, windows=WindowLayout(20, 3, (True, False))),
        random.Random(1),
    )
    prefixes = NamedPrefixes(engine)
    stem = [rng.randrange(VOCAB - 1) for _ in range(length)]
    request = prefixes.prepare("one", stem)
    finish(engine)
    prefixes.keep("one", request)
    hit = length // 8 * 8 if cache == "hash-block" else length
    for _ in range(30):
        ask(engine, [rng.randrange(VOCAB) for _ in range(90)])
    assert engine.scheduler.planner.index.num_evicted > 30  # type: ignore[attr-defined]
    assert ask(engine, [*stem, *(rng.randrange(VOCAB) for _ in range(20))]) == hit
    prefixes.unpin("one")
    for _ in range(9):
        ask(engine, [rng.randrange(VOCAB) for _ in range(90)])
    assert engine.match([*stem, 1]) == 0
