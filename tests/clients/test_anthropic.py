"""Anthropic's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

MODEL = "scripted"
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
HELLO = "You are the user, and said: Hello!"


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with (
        anthropic.DefaultHttpxClient(verify=False) as plain,
        anthropic.Anthropic(
            base_url=url, api_key="any", max_retries=0, http_client=plain
        ) as client,
    ):
        yield client


def user(text: Any) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(client: Any, text: str, **options: Any) -> Any:
    options = {"max_tokens": 500, **options}
    return client.messages.create(model=MODEL, messages=user(text), **options)


def total(usage: Any) -> int:
    """All tokens of a prompt."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached


def test_chat(client: Any):
    answer = ask(client, "Hello!", system="Be kind.")
    (block,) = answer.content
    assert (block.type, block.text, answer.stop_reason) == ("text", HELLO, "end_turn")
    assert answer.usage.output_tokens > 5


def test_chat_streamed(client: Any):
    with client.messages.stream(model=MODEL, max_tokens=500, messages=user("Hello!")) as stream:
        texts = [*stream.text_stream]
        message = stream.get_final_message()
    assert "".join(texts) == HELLO == message.content[0].text and len(texts) > 5
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 5


def test_chat_async(url: str):
    async def talk() -> str:
        plain = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key="any", max_retries=0, http_client=plain
        ) as client:
            options: Any = {"model": MODEL, "max_tokens": 500, "messages": user("Hello!")}
            async with client.messages.stream(**options) as stream:
                return "".join([text async for text in stream.text_stream])

    assert asyncio.run(talk()) == HELLO


def test_an_answer_that_is_cut_or_stopped_says_so(client: Any):
    assert ask(client, "Hello!", max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, "Hello!", stop_sequences=["said"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "said")


def test_tokens_are_counted(client: Any):
    options: Any = {"messages": user("Hello!"), "system": "Be kind.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(model=MODEL, **options).input_tokens
    used = client.messages.create(model=MODEL, max_tokens=1, **options).usage
    assert counted == total(used)


def test_what_is_marked_is_cached(client: Any, fresh: str):
    control: Any = {"type": "ephemeral"}
    system = [{"type": "text", "text": f"{fresh} Be kind. " * 4, "cache_control": control}]
    first = ask(client, "Hello, for the first time!", system=system).usage
    assert first.cache_creation_input_tokens > 40
    second = ask(client, "Hello, for the second time!", system=system).usage
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert total(second) == total(first)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_are_called_and_their_results_are_read(client: Any, fresh: str, stream: bool):
    question = user(f"{fresh} How is the weather in Oslo and Rome?")
    options: Any = {"model": MODEL, "max_tokens": 500, "tools": [WEATHER]}
    if stream:
        with client.messages.stream(messages=question, **options) as events:
            kinds = [event.type for event in events]
            first = events.get_final_message()
        assert "input_json" in kinds and kinds[-1] == "message_stop"
    else:
        first = client.messages.create(messages=question, **options)
    assert first.stop_reason == "tool_use"
    assert [(block.type, block.name, block.input) for block in first.content] == [
        ("tool_use", "get_weather", {"city": "Oslo"}),
        ("tool_use", "get_weather", {"city": "Rome"}),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather}
        for block, weather in zip(first.content, ("rainy", "dry"), strict=True)
    ]
    said = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    second = client.messages.create(messages=[*question, said, *user(results)], **options)
    assert second.content[0].text == "It is rainy and dry."
    cached = second.usage.cache_read_input_tokens
    assert cached == total(first.usage) + first.usage.output_tokens - 1


def test_the_helper_that_runs_tools(client: Any):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return {"Oslo": "rainy", "Rome": "dry"}[city]

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=500,
        tools=[get_weather],
        messages=user("How is the weather in Oslo and Rome?"),
    )
    *_, last = runner
    assert last.content[0].text == "It is rainy and dry."


def test_one_tool_at_a_time(client: Any):
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    question = "How is the weather in Oslo and Rome?"
    answer = ask(client, question, tools=[WEATHER], tool_choice=choice)
    assert [block.input for block in answer.content] == [{"city": "Oslo"}]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "named"]
)
def test_a_call_that_is_required(client: Any, choice: Any):
    answer = ask(client, "Hello!", tools=[WEATHER], tool_choice=choice)
    (block,) = answer.content
    assert (block.type, block.input) == ("tool_use", {"city": "Oslo"})
    assert answer.stop_reason == "tool_use"


def test_no_tool_is_called_where_none_may(client: Any):
    answer = ask(client, "Hello!", tools=[WEATHER], tool_choice={"type": "none"})
    assert answer.content[0].text == HELLO


def test_an_answer_parsed_as_a_class(client: Any):
    answer = client.messages.parse(
        model=MODEL, max_tokens=500, messages=user("Who is Nora?"), output_format=Person
    )
    assert answer.parsed_output == Person(name="Nora Lund", age=30)


def test_thoughts_apart_from_the_answer(client: Any):
    answer = ask(client, "What is 2 + 2?")
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text"] and answer.content[1].text == "4"
    assert answer.content[0].thinking.strip() == "Two and two."
    off = ask(client, "What is 2 + 2?", thinking={"type": "disabled"})
    assert [block.text for block in off.content] == ["4"]


def test_what_cannot_be_is_refused(client: Any):
    for options, sentence in (
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "f"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "not"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=sentence) as error:
            ask(client, "Hello!", **options)
        assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=user("Hello!"))
