"""Tools, thoughts and JSON over both APIs, by their clients, from a model that says a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.runtime.server.live import LiveServer, live
from tests.scripted import call, scripted_llm, turns

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FLAT = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CITIES = ["Oslo", "Rome"]


def say(prompt: str) -> list[str]:
    """What the model would rather say, and what it says if it must not."""
    return [answer(prompt), call("weather", city="Bern"), '{"city": "Bern"}']


def answer(prompt: str) -> str:
    """Calls for each city that is asked for, then what came of it."""
    said = turns(prompt)[:-1]
    role, text = said[-1]
    if "<tool_response>" in text:
        results = text.replace("<tool_response>", "").replace("</tool_response>", "").split()
        return "It is " + " and ".join(results)
    if text.startswith("Think"):
        return "<think>\nHm.\n</think>\n\nDone."
    calls = [call("weather", city=city) for city in CITIES if city in text]
    return "\n".join(["Let me see.", *calls]) if calls else f"{role}: {text}"


@pytest.fixture(scope="module")
def scripted() -> Iterator[LiveServer]:
    with live(scripted_llm(say)) as server:
        yield server
        server.call(server.backend.llm.prefixes.drop_yielding)
        server.assert_idle()


@pytest.fixture
def responses(scripted: LiveServer) -> Iterator[Any]:
    with (
        openai.DefaultHttpxClient(verify=False) as plain,
        openai.OpenAI(
            base_url=f"{scripted.url}/v1", api_key="any", max_retries=0, http_client=plain
        ) as client,
    ):
        yield client.responses


@pytest.fixture
def messages(scripted: LiveServer) -> Iterator[Any]:
    with (
        anthropic.DefaultHttpxClient(verify=False) as plain,
        anthropic.Anthropic(
            base_url=scripted.url, api_key="any", max_retries=0, http_client=plain
        ) as client,
    ):
        yield client.messages


def respond(responses: Any, stream: bool, given: Any, **more: Any) -> Any:
    asked = {"model": "scripted", "input": given, "tools": [{"type": "function", **FLAT}], **more}
    if not stream:
        return responses.create(**asked)
    with responses.stream(**asked) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_tools_and_go_on_from_their_results(responses: Any, stream: bool):
    first = respond(responses, stream, "Oslo and Rome?")
    text, *calls = first.output
    assert text.content[0].text.strip() == "Let me see."
    assert [json.loads(c.arguments) for c in calls] == [{"city": city} for city in CITIES]
    assert [(c.type, c.name) for c in calls] == [("function_call", "weather")] * 2
    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": f"{i}°"}
        for i, c in enumerate(calls, 7)
    ]
    by_id = respond(responses, stream, results, previous_response_id=first.id)
    sent = [item.to_dict() for item in first.output]
    whole = [{"role": "user", "content": "Oslo and Rome?"}, *sent, *results]
    by_items = respond(responses, stream, whole)
    for second in (by_id, by_items):
        assert second.output_text == "It is 7° and 8°"
        # Nothing of the first turn is computed again but its last token, which had no KV.
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_messages_use_tools_and_go_on_from_their_results(messages: Any, stream: bool):
    def create(*conversation: Any, **more: Any) -> Any:
        asked = {"model": "scripted", "max_tokens": 200, "tools": [TOOL], **more}
        if not stream:
            return messages.create(messages=[*conversation], **asked)
        with messages.stream(messages=[*conversation], **asked) as events:
            return events.get_final_message()

    question = {"role": "user", "content": "Oslo and Rome?"}
    first = create(question)
    text, *calls = first.content
    assert first.stop_reason == "tool_use" and text.text.strip() == "Let me see."
    assert [(c.name, c.input) for c in calls] == [("weather", {"city": c}) for c in CITIES]
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": f"{i}°"}
        for i, c in enumerate(calls, 7)
    ]
    results[-1]["cache_control"] = {"type": "ephemeral"}
    said = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    second = create(question, said, {"role": "user", "content": results})
    assert second.content[0].text == "It is 7° and 8°" and second.stop_reason == "end_turn"
    first_usage, usage = first.usage, second.usage
    known = first_usage.input_tokens + first_usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens >= known + first_usage.output_tokens - 1
    # Behind the last result, which is marked, the template asks for the answer; or all was cached.
    assert (usage.input_tokens, usage.cache_creation_input_tokens > 0) in ((0, False), (3, True))


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_items_and_blocks_and_may_be_sent_back(
    responses: Any, messages: Any, stream: bool
):
    response = respond(responses, stream, "Think.", tools=[])
    thought, text = response.output
    assert (thought.type, thought.content[0].text.strip()) == ("reasoning", "Hm.")
    assert text.content[0].text.strip() == "Done."
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    sent = [item.to_dict() for item in response.output]
    again = [{"role": "user", "content": "Think."}, *sent, {"role": "user", "content": "A"}]
    assert respond(responses, stream, again, tools=[]).output_text == "user: A"

    asked = {"model": "scripted", "max_tokens": 100}
    question = {"role": "user", "content": "Think."}
    if stream:
        with messages.stream(messages=[question], **asked) as events:
            message = events.get_final_message()
    else:
        message = messages.create(messages=[question], **asked)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Hm.")
    assert text.text.strip() == "Done."
    answered = {"role": "assistant", "content": [thinking.to_dict(), text.to_dict()]}
    conversation = [question, answered, {"role": "user", "content": "A"}]
    assert messages.create(messages=conversation, **asked).content[0].text == "user: A"


@pytest.mark.parametrize(
    ("choice", "asked"),
    [("required", {"type": "any"}), ("named", {"type": "tool", "name": "weather"})],
)
def test_a_call_that_must_come_does(responses: Any, messages: Any, choice: str, asked: Any):
    named = {"type": "function", "name": "weather"}
    response = respond(responses, False, "Hi", tool_choice=named if choice == "named" else choice)
    (item,) = response.output
    assert item.type == "function_call" and {*json.loads(item.arguments)} == {"city"}
    message = messages.create(
        model="scripted",
        max_tokens=200,
        tools=[TOOL],
        tool_choice=asked,
        messages=[{"role": "user", "content": "Hi"}],
    )
    (block,) = message.content
    assert (block.type, block.name, {*block.input}) == ("tool_use", "weather", {"city"})
    assert message.stop_reason == "tool_use"


def test_an_answer_follows_a_schema(responses: Any, messages: Any):
    format_ = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    response = respond(responses, False, "Hi", tools=[], text={"format": format_})
    assert {*json.loads(response.output_text)} == {"city"}
    message = messages.create(
        model="scripted",
        max_tokens=200,
        messages=[{"role": "user", "content": "Hi"}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert {*json.loads(message.content[0].text)} == {"city"}


def test_changed_tools_are_why_a_prompt_was_not_cached(responses: Any, messages: Any):
    first = respond(responses, False, "Hi")
    other = {"type": "function", **FLAT, "description": "Rain or shine."}
    options = {"comparison_response_id": first.id}
    told = respond(responses, False, "Hi", tools=[other], prompt_cache_options=options)
    assert told.prompt_cache_diagnostics.reason == "tools_changed"
    asked = {"model": "scripted", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    before = messages.create(**asked, tools=[TOOL], diagnostics={"previous_message_id": None})
    diagnostics = {"previous_message_id": before.id}
    changed = [{**TOOL, "description": "Sun or snow."}]
    message = messages.create(**asked, tools=changed, diagnostics=diagnostics)
    assert message.diagnostics.cache_miss_reason.type == "tools_changed"


def test_a_message_that_is_begun_goes_on(messages: Any):
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "us"}]
    message = messages.create(model="scripted", max_tokens=20, messages=begun)
    assert message.content[0].text == "er: Hi"
