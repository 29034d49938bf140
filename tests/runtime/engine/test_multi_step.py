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
from tests.helpers.engines import finish
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


def test_without_a_seed_completions_and_requests_draw_apart(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=30, n=3, ignore_eos=True)
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
