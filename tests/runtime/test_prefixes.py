"""Named prefixes through the runtime."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from radixcache import LLM, AsyncLLM, InvalidRequest, PinError, SamplingParams
from radixcache.runtime.engine import named_prefixes as prefixes
from radixcache.runtime.engine.named_prefixes import NamedPrefixes
from tests.helpers.engines import finish, make_engine
from tests.helpers.models import BYTES_PER_TOKEN

GREEDY = SamplingParams(temperature=0, max_tokens=6)
SYSTEM = "You are a very careful assistant who thinks twice. "


@pytest.fixture
def llm(path: Path) -> LLM:
    return LLM(path, page_size=4, kv_cache_memory_bytes=60 * 4 * BYTES_PER_TOKEN)  # 60 pages


def fill(llm: LLM) -> None:
    """Ask for more than the pool holds."""
    for i in range(20):
        llm.generate(f"{i} something else, long enough to fill the pool: {'x' * 20}", GREEDY)


def prefer(llm: LLM, text: str, lifetime: float = 60.0, salt: str | None = None) -> None:
    llm.call(lambda: llm.prefixes.prefer(llm.encode(text), lifetime, salt))
    llm.call(llm.engine.check)


def preferred(llm: LLM) -> list[int]:
    """The lengths of what is preferred."""
    prefixes = llm.call(llm.prefixes.list)
    assert all(prefix.yields for prefix in prefixes)
    return [len(prefix.tokens) for prefix in prefixes]


def test_a_prompt_goes_on_from_a_prefix_by_name_under_any_pressure(llm: LLM) -> None:
    llm.pin_prefix("system", SYSTEM)
    fill(llm)
    assert llm.cache.stats.evicted_pages > 20
    (named,) = llm.generate("Hello", GREEDY, prefix="system")
    assert named.num_cached_tokens == len(SYSTEM)
    assert named.prompt_token_ids == llm.encode(SYSTEM + "Hello")
    again = llm.pin_prefix("system", SYSTEM, lifetime=60)
    assert again.expires is not None and [*llm.prefixes.list()] == [again], "the same is no other"
    llm.unpin_prefix("system")
    llm.reset_prefix_cache()
    (whole,) = llm.generate(SYSTEM + "Hello", GREEDY)
    assert named.outputs[0].token_ids == whole.outputs[0].token_ids


def test_prefixes_are_listed_unpinned_and_expire(path: Path) -> None:
    time = 100.0
    engine = make_engine(path)
    prefixes = NamedPrefixes(engine, now=lambda: time)
    for name, tokens, lifetime in (("short", [1], 5), ("long", [2], None)):
        request = prefixes.prepare(name, tokens, lifetime=lifetime)
        finish(engine)
        prefixes.keep(name, request, lifetime=lifetime)
    assert [prefix.name for prefix in prefixes.list()] == ["short", "long"]
    time = 105.0
    assert [prefix.name for prefix in prefixes.list()] == ["long"]
    assert engine.cache.pins == {(None, "long"): 1}
    prefixes.unpin("long")
    assert prefixes.list() == [] and engine.cache.pins == {}
    engine.cache.reset()  # refuses while a pin lives


def test_bad_prefixes_are_one_sentence_and_cost_nothing(path: Path, llm: LLM) -> None:
    llm.pin_prefix("system", SYSTEM)
    for call, error, sentence in (
        (lambda: llm.generate(["a", "b"], prefix="sytem"), PinError, "no prefix named 'sytem'"),
        (lambda: llm.unpin_prefix("sytem"), PinError, "no prefix named 'sytem'"),
        (lambda: llm.pin_prefix("system", "x"), PinError, "another prefix named 'system' is pinn"),
        (lambda: llm.pin_prefix("big", "y" * 60), PinError, "28 pinned pages, the share is 15"),
        (lambda: llm.pin_prefix("empty", ""), InvalidRequest, "the prompt is empty"),
        (lambda: llm.pin_prefix("x", "x", lifetime=0), InvalidRequest, "lifetime must be"),
    ):
        with pytest.raises(error, match=sentence):
            call()
        assert not llm.call(lambda: llm.engine.has_work) and llm.cache.pins == {
            (None, "system"): len(SYSTEM)
        }
        llm.cache.check()
    bare = LLM(path, cache="none", kv_cache_memory_bytes="1MiB")
    with pytest.raises(PinError, match="runs without a prefix cache"):
        bare.pin_prefix("system", SYSTEM)


def test_a_salted_prefix_serves_its_salt_only(llm: LLM) -> None:
    llm.pin_prefix("mine", SYSTEM, cache_salt="a")
    assert llm.generate("x", GREEDY, prefix="mine", cache_salt="a")[0].num_cached_tokens > 0
    assert llm.explain("x", prefix="mine", cache_salt="a").num_tokens == len(SYSTEM) + 1
    for salt in (None, "b"):
        for call in (
            lambda salt: llm.generate("x", GREEDY, prefix="mine", cache_salt=salt),
            lambda salt: next(llm.stream("x", GREEDY, prefix="mine", cache_salt=salt)),
            lambda salt: llm.explain("x", prefix="mine", cache_salt=salt),
            lambda salt: llm.unpin_prefix("mine", cache_salt=salt),
            lambda salt: asyncio.run(AsyncLLM(llm).unpin_prefix("mine", cache_salt=salt)),
        ):
            with pytest.raises(PinError, match="no prefix named 'mine' is pinned with"):
                call(salt)
    asyncio.run(AsyncLLM(llm).unpin_prefix("mine", cache_salt="a"))
    assert llm.prefixes.list() == [] and llm.cache.pins == {}


def test_prefixes_whose_pins_a_broken_cache_forgot_end_quietly(path: Path) -> None:
    llm = LLM(path, page_size=1, kv_cache_memory_bytes="1MiB")
    for name in ("unpinned", "expiring"):
        llm.pin_prefix(name, SYSTEM, lifetime=0.01 if name == "expiring" else None)
    llm.cache._inside = True  # as if a change had been cut off
    llm.cache.recover()
    assert llm.cache.pins == {}
    time.sleep(0.02)
    assert [prefix.name for prefix in llm.prefixes.list()] == ["unpinned"]
    llm.unpin_prefix("unpinned")
    assert llm.prefixes.list() == []


def test_a_prefix_whose_pin_a_broken_cache_forgot_is_pinned_anew_once_computed(path: Path) -> None:
    with LLM(path, page_size=1, kv_cache_memory_bytes="1MiB") as llm:
        llm.pin_prefix("system", SYSTEM, cache_salt="s")

        def cut_off() -> None:
            llm.cache._inside = True

        llm.call(cut_off)
        for _ in range(2):
            assert llm.call(lambda: llm.cache.pins) == {}
            llm.generate("a", GREEDY, prefix="system", cache_salt="s")
        assert llm.cache.pins == {("s", "system"): len(SYSTEM)}
        llm.call(llm.engine.check)


def test_what_is_preferred_survives_pressure_and_yields_to_need(llm: LLM) -> None:
    llm.generate(SYSTEM, GREEDY)
    prefer(llm, SYSTEM)
    fill(llm)
    assert llm.generate(SYSTEM + "Hi", GREEDY)[0].num_cached_tokens == len(SYSTEM)
    # A named prefix takes the place: with both, more than the share were pinned.
    llm.pin_prefix("named", "y" * 40)
    assert [prefix.name for prefix in llm.call(llm.prefixes.list)] == ["named"]
    llm.unpin_prefix("named")
    # So does a request that needs all pages but one, or may need them: it has no limit.
    for limit in (60 * 4 - 4 - 10, None):
        llm.generate(SYSTEM, GREEDY)
        prefer(llm, SYSTEM)
        assert preferred(llm) == [len(SYSTEM)]
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        (output,) = llm.generate("0123456789", params)
        assert len(output.outputs[0].token_ids) >= 60 * 4 - 4 - 10 and preferred(llm) == []
    # Nothing is pinned that is not cached, or is too much.
    prefer(llm, "never sent")
    llm.generate("z" * 80, GREEDY)
    prefer(llm, "z" * 80)
    assert preferred(llm) == []


def test_a_request_that_finds_no_room_gets_that_of_what_is_preferred(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it came that both are there."""
    monkeypatch.setattr(llm.prefixes, "make_room", lambda num_tokens: None)
    params = SamplingParams(temperature=0, max_tokens=60 * 4 - 4 - 10, ignore_eos=True)
    (alone,) = llm.generate("0123456789", params)
    llm.reset_prefix_cache()
    llm.generate(SYSTEM, GREEDY)
    stream = llm.stream("0123456789", params)
    next(stream)
    prefer(llm, SYSTEM)
    assert preferred(llm)
    *_, output = stream
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids and output.error is None
    assert not preferred(llm)
    llm.call(llm.engine.check)


def test_what_is_preferred_takes_the_place_of_what_it_begins_with_and_outlives(llm: LLM) -> None:
    for salt in (None, "a"):
        llm.generate(SYSTEM, GREEDY, cache_salt=salt)
    for length, lifetime, salt, then in (
        (10, 3600, None, [10]),
        (20, 60, None, [10, 20]),  # the first one lives longer
        (30, 60, None, [10, 30]),
        (40, 7200, "a", [10, 30, 40]),  # of another salt
        (10, 0.01, None, [30, 40, 10]),  # shorter than what it has: it stays
        (30, 7200, None, [40, 30]),
    ):
        prefer(llm, SYSTEM[:length], lifetime, salt)
        time.sleep(0.02 if lifetime < 1 else 0)
        assert preferred(llm) == then
    assert [prefix.cache_salt for prefix in llm.call(llm.prefixes.list)] == ["a", None]
    asyncio.run(AsyncLLM(llm).reset_prefix_cache())
    assert preferred(llm) == []


def test_of_many_that_are_preferred_those_asked_for_last_stay(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the longest to the shortest they need no page but those of the first."""
    monkeypatch.setattr(prefixes, "MAX_PREFERRED", 4)
    llm.generate(SYSTEM, GREEDY)
    for seconds, length in enumerate([*range(20, 10, -1), 14]):
        prefer(llm, SYSTEM[:length], 60 + seconds)
        last = [*range(min(20, length + 3), length - 1, -1)]
        assert preferred(llm) == ([14] if seconds == 10 else last)
