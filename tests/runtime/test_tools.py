"""Tools in Python: text in, text out, and a message that says what was called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixcache import LLM, SamplingParams
from tests.helpers.scripted import scripted_llm, turns

GREEDY = SamplingParams(temperature=0, max_tokens=None)
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"properties": {"name": {"type": "string"}}}},
}
NUM_TURNS = 6


def script(prompt: str) -> str:
    said = turns(prompt)[:-1]
    results = sum("<tool_response>" in text for _, text in said)
    if said[-1][1] == "Hello" or results == NUM_TURNS:
        return "<think>Hm.</think>Hello."
    return f'On it. <tool_call>{{"name":"look_up", "arguments":{{"name":"{results}"}}}}</tool_call>'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted_llm(script) as llm:
        yield llm


def test_a_message_is_read_and_sent_back(llm: LLM):
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    computed = 0
    for turn in range(NUM_TURNS):
        (output,) = llm.chat(messages, GREEDY, tools=[LOOK_UP])
        if turn:
            assert output.num_cached_tokens == computed - 1
        computed = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        assert "<tool_call>" in output.outputs[0].text
        message = llm.read_message(output, [LOOK_UP])
        assert message["content"] == "On it."
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "look_up", "arguments": {"name": str(turn)}}
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "found"}]
    (output,) = llm.chat(messages, GREEDY, tools=[LOOK_UP])
    last = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
    assert llm.read_message(output) == last


def test_the_template_takes_parts_values_and_an_unfinished_message(llm: LLM):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked = [{"role": "user", "content": parts}]
    (silent,) = llm.chat(asked, GREEDY, chat_template_kwargs={"enable_thinking": False})
    prompt = llm.history.tokenizer.decode(silent.prompt_token_ids, special=True)
    assert "Hel\nlo" in prompt and "<think>" in prompt
    begun = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<think>Hm"}]
    (rest,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert rest.outputs[0].text == ".</think>Hello."
