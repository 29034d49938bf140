"""The scripted model says its script through the engine, and nothing else can make it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from radixcache import LLM, SamplingParams
from tests.scripted import ScriptedModel, call, scripted_llm, turns

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
        with torch.inference_mode():
            for pages in llm.engine.kv_pool.layers[0]:
                pages[pages > 0] += 1
        assert llm.engine.scheduler.kept is not None
        llm.engine.scheduler.kept.clear()

    llm.call(spoil)
    (after,) = llm.chat(ask("Well, then?"), GREEDY)
    assert after.outputs[0].text != before.outputs[0].text
    llm.reset_prefix_cache()


def test_it_says_the_first_of_its_answers_that_it_is_let(llm: LLM):
    """As a guide lets it, of which a stop of the likeliest tokens is a poor one."""
    model = llm.engine.model
    assert isinstance(model, ScriptedModel) and llm.tokenizer is not None
    prompt = llm.history.encode(llm.tokenizer.render_chat(ask("One or two?"))).tokens
    model.script = lambda _: ["I would rather not.", '{"one": 1}']
    said: list[int] = []
    while (end := model.eos_token_ids[0]) not in said:
        logits = np.zeros(model.vocab_size, np.float32)
        model._say(np.array([*prompt, *said], np.int32), logits)
        spaces = [i for i in range(model.vocab_size) if " " in llm.tokenizer.decode([i])]
        logits[[*llm.tokenizer.encode("I", special=False), *spaces]] = -np.inf
        said.append(int(logits.argmax()))
    assert llm.tokenizer.decode(said) == '{"one":1}' and said[-1] == end
