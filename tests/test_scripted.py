"""The scripted model says its script through the engine, and nothing else can make it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixcache import LLM, SamplingParams
from tests.scripted import call, scripted_llm, turns

ANSWER = 'It is "7 °C", or so.\n' + call("look_up", row="Oslo", column="°C")
GREEDY = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    def script(prompt: str) -> str:
        role, text = turns(prompt)[-2]
        return ANSWER if text == "Oslo?" else f"{len(turns(prompt))} turns, {role}: {text}"

    with scripted_llm(script) as llm:
        yield llm


def ask(*texts: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_says_its_script(llm: LLM, temperature: float):
    params = SamplingParams(temperature=temperature, max_tokens=None)
    (output,) = llm.chat(ask("Oslo?"), params)
    assert output.outputs[0].finish_reason == "stop"
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(output.outputs[0].token_ids, special=True) == ANSWER + "<|im_end|>"


def test_a_batch_of_conversations_gets_each_its_own_answer(llm: LLM):
    many = [ask(*("abcdefg"[: 2 * i + 1])) for i in range(4)]
    texts = [output.outputs[0].text for output in llm.chat(many, GREEDY)]
    assert texts == [f"{2 * i + 2} turns, user: {'aceg'[i]}" for i in range(4)]


def test_a_second_turn_is_cached_and_answered(llm: LLM):
    llm.reset_prefix_cache()
    (first,) = llm.chat(ask("Well?"), GREEDY)
    (second,) = llm.chat(ask("Well?", first.outputs[0].text, "And?"), GREEDY)
    assert second.outputs[0].text == "4 turns, user: And?"
    generated = len(first.prompt_token_ids) + len(first.outputs[0].token_ids)
    assert second.num_cached_tokens == generated - 1


def test_a_page_that_is_wrong_shows(llm: LLM):
    llm.reset_prefix_cache()
    (before,) = llm.chat(ask("Well, then?"), GREEDY)

    def spoil() -> None:
        for pages in llm.engine.kv_pool.layers[0]:
            pages[pages > 0] += 1
        assert llm.engine.scheduler.kept is not None
        llm.engine.scheduler.kept.clear()

    llm.call(spoil)
    (after,) = llm.chat(ask("Well, then?"), GREEDY)
    assert after.outputs[0].text != before.outputs[0].text
    llm.reset_prefix_cache()
