"""Windows that are kept apart: a hit goes on from a saved state, and no token differs."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixcache import LLM, RadixCache, SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.named_prefixes import NamedPrefixes
from radixcache.runtime.model.kv_pool import WindowLayout
from tests.helpers.cover import seeds
from tests.helpers.engines import finish, only_by_saved_states
from tests.helpers.hash_model import (
    VOCAB,
    assert_cached_is_computed,
    assert_left_is_computed,
    greedy,
    hash_engine,
)
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
        only_by_saved_states(engine)
    return engine


def verify_what_is_found(engine: Engine) -> None:
    """Let every fifth check look at what is cached, and at what can be found beside it."""
    check, turns = engine.check, count()

    def both() -> None:
        check()
        if next(turns) % 5 == 0:
            assert_cached_is_computed(engine)

    engine.check = both  # type: ignore[method-assign]


@seeds(20_261_127, 30)
def test_random_requests_get_the_tokens_of_their_own_texts(seed: int) -> None:
    """A model of checksums, whose windows tell any token too few, or another's."""
    rng, total = random.Random(seed), Counter[str]()

    def is_right(prompt: list[int], tokens: list[int], count: int) -> bool:
        return tokens == greedy(prompt, count)

    for _ in range(6):
        engine = windowed_engine(rng)
        verify_what_is_found(engine)
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


def use_free_pages_anew(engine: Engine) -> None:
    """Hand all free pages out once, so that nothing in them is found any more."""
    pool = engine.cache.pool
    pool.drop(pool.allocate(pool.num_free))
    engine.check()


def text(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("cache", ["radix", "hash-block"])
@pytest.mark.parametrize("cut", [5, 16, 37, 60, 99])
def test_a_prompt_goes_on_from_any_page_of_a_window_in_a_cached_text(cut: int, cache: str) -> None:
    """At a multiple of 3 tokens; in whole blocks of 4, where hits are."""
    engine = hash_engine(cache, page_size=4, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    stem = text(100)
    assert ask(engine, stem) == 0
    match = cut if cache == "radix" else cut // 4 * 4
    assert ask(engine, [*stem[:cut], (stem[cut] + 1) % VOCAB, 1]) == match // 3 * 3
    assert ask(engine, [*stem[:cut], (stem[cut] + 2) % VOCAB, 1]) == match, "there is a saved state"
    assert ask(engine, [*stem[:cut], 1, 2, 3], "salt") == 0


def test_what_was_left_is_found_until_its_memory_is_used_anew() -> None:
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    stem, index = text(100), engine.cache.windows
    assert index is not None
    ask(engine, stem)
    assert index.counts["left"] >= 20
    for end in (98, 79):
        assert index.depth(np.array(stem, np.int32), None, end) == end // 3 * 3
    use_free_pages_anew(engine)
    assert index.counts["left"] == 0
    assert index.depth(np.array(stem, np.int32), None, 98) == 96, "what saved states hold stays"
    assert index.depth(np.array(stem, np.int32), None, 79) == 0
    assert ask(engine, [*stem[:50], 27, 1]) == 0


def test_pages_with_nothing_to_find_are_handed_out_first_and_cached_ones_last() -> None:
    for cache in ("radix", "hash-block"):
        engine = hash_engine(cache, 4, 120, windows=WindowLayout(20, 3, (True, False)))
        index, pool = engine.cache.windows, engine.cache.pool
        assert index is not None
        ask(engine, text(100))
        cached = engine.cache.cached_length(text(100))
        while engine.cache.change(index.evict):
            pass
        blank, left = index.left.num_blank, index.left.num_left
        assert blank and left >= 20 and cached >= 100
        pages = [pool.allocate(blank)]
        assert index.left.num_left == left
        oldest = [*index.left._queues[1]]
        pages.append(pool.allocate(len(oldest)))
        assert pages[-1].tolist() == oldest, (
            "those far from the prompt's end, the first freed first"
        )
        assert index.depth(np.array(text(100), np.int32), None, 98) == 96, "near the prompt's end"
        pages.append(pool.allocate(left - len(oldest)))
        assert engine.cache.cached_length(text(100)) == cached
        pool.drop(np.concatenate(pages))


def test_who_looks_and_is_not_admitted_has_not_used_anything() -> None:
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    ask(engine, text(100))
    index = engine.cache.windows
    assert index is not None
    for limit, length in ((20, 18), (95, 93), (100, 100)):
        found = index.find(np.array(text(100), np.int32), None, limit)
        assert found is not None and found.key.length == length
        index.release(found)
    assert not any(saved.hits for saved in index._kept.values())
    assert not index._hits.total()


def test_a_half_filled_page_that_is_written_anew_has_lost_its_windows() -> None:
    """A text ends behind a fork in a page; its tail goes, and another one is written there."""
    engine = hash_engine(page_size=16, num_pages=600, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    cache, stem, gone, new = engine.cache, text(40), text(40, 2), text(40, 3)
    new[0] = (gone[0] + 1) % VOCAB
    ask(engine, stem + gone)
    lease = cache.acquire(stem + new)
    assert isinstance(cache, RadixCache)
    cache._split(lease.node, 40)  # type: ignore[attr-defined]
    while cache.cached_length(stem + gone) > 40:
        cache.evict(1)
    cache.reserve(lease, 80)
    assert not lease.take_copies(), "the page is claimed in place"
    cache.publish(lease, new)
    cache.commit()
    cache.release(lease)
    assert cache.windows is not None
    assert cache.windows.depth(np.array(stem + new, np.int32), None, 80) <= 40
    assert_cached_is_computed_in_windows(engine, stem + new)


def assert_cached_is_computed_in_windows(engine: Engine, tokens: list[int]) -> None:
    """What can be found along a path that no model has computed."""
    pool: Any = engine.kv_pool
    table, length = engine.cache.find_pages(np.array(tokens, np.int32), None)
    assert length == len(tokens) and engine.cache.windows is not None
    assert_left_is_computed(pool, engine.cache.windows.left, np.array(tokens), table)


def test_prompts_that_share_what_is_being_computed_wait_a_step_for_its_windows() -> None:
    windows = WindowLayout(20, 3, (True, False))
    engine = hash_engine("radix", 4, 900, max_num_batched_tokens=2000, windows=windows)
    only_by_saved_states(engine)
    params = SamplingParams(temperature=0, max_tokens=2)
    requests = [engine.add_request(text(120) + text(80, i), params) for i in range(2, 6)]
    finish(engine)
    assert sorted(r.sequences[0].cached_tokens for r in requests) == [0, 120, 120, 120]


def test_a_small_window_is_computed_again_where_nothing_is_left() -> None:
    """From 19 tokens before the last page boundary of the full layers, on a page of its own."""
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    stem = text(100)
    assert ask(engine, stem) == 0
    use_free_pages_anew(engine)
    assert ask(engine, [*stem[:51], 27, 1]) == (48 - 19) // 3 * 3
    assert ask(engine, [*stem[:51], 26, 2]) == 51, "the one before has left a saved state"
    assert ask(engine, [*stem[:60], 27, 1], "salt") == 0


@pytest.mark.parametrize("cache", ["radix", "hash-block"])
def test_a_window_that_was_merely_left_is_kept_where_a_prefix_is_pinned(cache: str) -> None:
    engine = hash_engine(cache, 4, 80, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    prefixes, stem = NamedPrefixes(engine), text(100)
    ask(engine, stem)
    prefixes.prefer(stem[:50], 60)
    for seed in range(2, 12):
        ask(engine, text(90, seed))
    assert ask(engine, [*stem[:50], 27, 1]) == 48
    prefixes.drop_yielding()
    assert not engine.scheduler.planner.index._pinned  # type: ignore[attr-defined]


def test_a_window_from_which_a_waiting_prompt_resumes_is_evicted_last() -> None:
    engine = hash_engine("radix", 4, 120, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    stem, other = text(60), text(60, 2)
    for one in (stem, other):
        ask(engine, one)
    engine.cache.coming = lambda: [([*stem, 1], None)]
    for seed in range(3, 9):
        ask(engine, text(90, seed))
    assert engine.match([*other, 1]) == 0
    assert ask(engine, [*stem, 1]) == 60


def test_near_a_prompts_end_a_window_outlives_full_memory() -> None:
    """But what was used at a sixteenth of its age goes after it."""
    engine = hash_engine(page_size=4, windows=WindowLayout(20, 3, (True, False)))
    only_by_saved_states(engine)
    stem, index = text(100), engine.cache.windows
    assert index is not None
    ask(engine, stem)
    use_free_pages_anew(engine)
    near = next(kept for kept in index._kept.values() if kept.kind == "near")
    assert near.key.length == 80
    index._cache.clock += 30
    for last_use, goes in ((near.last_use - 500, False), (near.last_use - 460, True)):
        while engine.cache.change(index.evict, last_use):
            pass
        assert (near.key in index._kept) != goes


def test_a_window_that_is_not_whole_is_no_saved_state() -> None:
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
    use_free_pages_anew(engine)
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
    assert all(saved.key.length >= 60 for saved in index._kept.values())


def test_prompts_that_wait_for_a_seat_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up hashes a prompt: 15 ms a step for 32 of 32k tokens."""
    engine = hash_engine(max_num_seqs=1, windows=WindowLayout(20, 3, (True, False)))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for first in range(4):
        engine.add_request([first, *range(20)], params)
    engine.step()
    monkeypatch.setattr(engine.scheduler.admission, "match", None)
    for _ in range(6):
        engine.step()
    monkeypatch.undo()
    assert finish(engine)


def test_a_commit_that_is_cut_off_leaves_its_saved_states_one_holder(
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
@pytest.mark.parametrize("salt", [None, ""])
def test_an_ended_conversation_gives_up_nothing_once_its_own_part_is_gone(
    windows: WindowLayout | None, salt: str | None
) -> None:
    """What is found of it then, pages and saved states, is what others share."""
    engine = hash_engine(num_states=0 if windows else 30, windows=windows)
    stem, cache, index = text(64), engine.cache, engine.scheduler.planner.index  # type: ignore[attr-defined]
    assert isinstance(cache, RadixCache)
    given_up = lambda: (len(index._superseded), [leaf.last_use < 0 for leaf in cache._order])  # noqa: E731
    ask(engine, stem, salt)
    before = given_up()
    whole = np.array(stem + greedy(stem, 2), np.int32)
    engine.end_conversation(np.append(whole, [1, 2]).astype(np.int32), salt)
    assert given_up() == before and before[1] == [False]
    engine.end_conversation(whole, salt)
    assert given_up() == (before[0] + 1, [True])


@pytest.mark.parametrize("windows", [None, WindowLayout(20, 3, (True, False))])
def test_of_an_ended_conversation_every_saved_state_at_a_turns_end_goes_first(
    windows: WindowLayout | None,
) -> None:
    """They share pages, so that one of them alone would free little."""
    engine = hash_engine(num_states=0 if windows else 30, num_pages=900, windows=windows)
    index, tokens = engine.scheduler.planner.index, text(50)  # type: ignore[attr-defined]
    for ends in (False, False, True):
        params = SamplingParams(max_tokens=3, ignore_eos=True, ends_conversation=ends)
        request = engine.add_request(tokens, params)
        finish(engine)
        tokens = [*request.sequences[0].tokens.tolist(), *text(20, len(tokens))]
    left = {kept.kind for key, kept in index._kept.items() if key not in index._superseded}
    assert len(index._superseded) >= 5 and left <= {"near"}


@pytest.mark.parametrize("windows", [None, WindowLayout(20, 3, (True, False))])
@pytest.mark.parametrize("pins_again", [True, False])
def test_a_broken_cache_leaves_no_saved_state_pinned(windows, pins_again) -> None:
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
        assert engine.cache.pins and pinned()
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
