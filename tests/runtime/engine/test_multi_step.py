"""Answers of an engine that runs several steps in one call are those of single steps."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from radixcache import LLM, SamplingParams
from radixcache.runtime.engine import multi_step_runner
from radixcache.runtime.outputs import CompletionOutput
from tests.helpers.engines import finish, generated
from tests.helpers.hash_model import greedy, hash_engine
from tests.helpers.native import needs_kernels

pytestmark = needs_kernels

SEED = 20_261_130
KINDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0, "max_tokens": 3}, {"temperature": 1.2},
    {"temperature": 0.9, "seed": 7, "n": 2}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "stop": ["e", "1"]}, {"temperature": 0, "stop_token_ids": [*range(40, 60)]},
    {"temperature": 0, "ignore_eos": True}, {"temperature": 0.5, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.3}, {"temperature": 0, "min_tokens": 9},
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_memory_bytes="4MiB")


def answers(llm: LLM, seed: int, *, several: bool) -> tuple[list[CompletionOutput], Counter[str]]:
    """Of random requests that come and go, and the calls of the model."""
    rng, engine, calls = random.Random(seed), llm.engine, Counter[str]()
    engine.reset_cache()
    engine._next_id = 0  # the noise of unseeded requests
    requests = []
    with pytest.MonkeyPatch.context() as patch:
        if not several:
            patch.setattr(engine, "multi_step", None)
        for name in ("forward", "decode"):
            call = getattr(engine.model, name)
            counted = lambda *a, name=name, call=call, **k: (calls.update([name]), call(*a, **k))[1]  # noqa: E731
            patch.setattr(engine.model, name, counted)
        for _ in range(6):
            params = SamplingParams(**{"max_tokens": 40, **rng.choice(KINDS)})
            prompt = llm.encode(rng.choice(["How old is Clara Frost?", "abc", "Who is older?"]))
            requests.append(engine.add_request(prompt, params))
            for _ in range(rng.choice([0, 2, 5])):
                engine.step()
        finish(engine)
    engine.check()
    return [one for request in requests for one in request.output().outputs], calls


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_single_steps(llm: LLM, seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1.0)
    several, calls = answers(llm, seed, several=True)
    one, others = answers(llm, seed, several=False)
    assert several == one
    assert calls["decode"] and not others["decode"]
    assert calls.total() <= others.total()


def test_a_call_of_another_thread_waits_for_one_step(llm: LLM, monkeypatch: Any) -> None:
    """Also what a model computes slowly comes token by token."""
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def step() -> int:
        before = request.sequences[0].num_generated
        engine.step()
        return request.sequences[0].num_generated - before

    runner = engine.multi_step
    assert runner is not None
    runner.step_seconds = inf
    request = engine.add_request(llm.encode("abcabc"), params)
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1.0)
    assert [step() for _ in range(3)] == [1, 1, 8]  # a prompt, a step that is measured
    runner.interrupt.value = 1
    assert step() == 1
    runner.interrupt.value = 0
    runner.step_seconds = 0.4
    assert step() == 2
    runner.step_seconds = 0.6
    assert step() == 1
    waiting = engine.add_request(llm.encode("abcd"), replace(params, max_tokens=1))
    assert step() == 1 and waiting.finished
    finish(engine)


def test_a_larger_batch_is_measured_before_it_runs_several_steps(
    llm: LLM, monkeypatch: Any
) -> None:
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1.0)
    engine, counts = llm.engine, list[tuple[int, int]]()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert engine.multi_step is not None
    engine.multi_step.note(2, 2, 1e-3)  # one sequence
    for number in (1, 3, 2):
        finish(engine)
        requests = [engine.add_request([9 + i, number], params) for i in range(number)]
        engine.step()
        before = [request.sequences[0].num_generated for request in requests]
        engine.step()
        after = [request.sequences[0].num_generated for request in requests]
        counts += [(b, a - b) for b, a in zip(before, after, strict=True)]
    finish(engine)
    assert counts == [(1, 8)] + 3 * [(1, 1)] + 2 * [(1, 8)]


def test_while_others_interrupt_no_call_prepares_many_steps(llm: LLM, monkeypatch: Any) -> None:
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1.0)
    engine, asked = llm.engine, list[int]()
    decode, several = engine.model.decode, engine.multi_step
    assert several is not None

    def decode_and_note(ids: Any, batch: Any, *rest: Any) -> Any:
        asked.append(len(ids))
        several.interrupt.value = len(asked) in (1, 2)
        return decode(ids, batch, *rest)

    monkeypatch.setattr(engine.model, "decode", decode_and_note)
    request = engine.add_request(
        llm.encode("abc"), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    )
    finish(engine)
    assert asked[:4] == [8, 2, 2, 8] and len(request.sequences[0].generated) == 30


def test_the_step_behind_a_call_of_one_step_may_be_launched_before_its_tokens_are_read(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1e9)
    engine = hash_engine("radix", 4, 100, 64, 16)
    assert engine.multi_step is not None
    engine.multi_step.interrupt.value = 1
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, number] for number in range(3)]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    for engine.overlap in (False, False, True):  # a prompt, a step that is measured, a call
        engine.step()
    finish(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert generated([request])[0][0][: len(wanted := greedy(prompt, 12))] == wanted


def test_without_a_seed_completions_and_requests_draw_apart(llm: LLM) -> None:
    params = SamplingParams(temperature=9, max_tokens=30, n=3, ignore_eos=True)
    requests = [llm.engine.add_request(llm.encode("abc"), params) for _ in range(2)]
    finish(llm.engine)
    drawn = [one.token_ids for request in requests for one in request.output().outputs]
    assert len({*map(tuple, drawn)}) == 6


def test_a_call_on_the_worker_interrupts_the_steps(monkeypatch: Any) -> None:
    llm = LLM(kv_cache_memory_bytes="4MiB")
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1.0)
    decode, counts = llm.engine.model.decode, list[int]()
    decoding = threading.Event()

    def decode_when_interrupted(*step: Any) -> Any:
        if not counts:
            decoding.set()
            end = time.monotonic() + 20
            while not step[-1].interrupt.value and time.monotonic() < end:
                time.sleep(0.001)
        tokens, highest = decode(*step)
        counts.append(tokens.shape[1])
        return tokens, highest

    monkeypatch.setattr(llm.engine.model, "decode", decode_when_interrupted)
    with ThreadPoolExecutor(1) as pool:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        answer = pool.submit(llm.generate, "abc", params, use_tqdm=False)
        assert decoding.wait(20)
        assert llm.call(lambda: 5) == 5
        (output,) = answer.result()
    assert counts[0] == 1 and max(counts) == 8 and len(output.outputs[0].token_ids) == 30
