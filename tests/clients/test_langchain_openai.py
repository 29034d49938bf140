"""LangChain's model class for OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

langchain = pytest.importorskip("langchain_openai", reason="`make test-clients` has it")
messages: Any = pytest.importorskip("langchain_core.messages", reason="`make test-clients` has it")

QUESTION = "How is the weather in Oslo and Rome?"
HELLO = "You are the user, and said: Hello!"
CITIES = [{"city": "Oslo"}, {"city": "Rome"}]


class Person(BaseModel):
    """A person of whom one asks."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "rainy", "Rome": "dry"}[city]


@pytest.fixture
def model(url: str) -> Any:
    return langchain.ChatOpenAI(
        model="scripted", base_url=f"{url}/v1", api_key="any", max_retries=0, stream_usage=True
    )


def arguments(message: Any) -> list[dict[str, Any]]:
    assert all(call["name"] == "get_weather" for call in message.tool_calls)
    return [call["args"] for call in message.tool_calls]


def test_chat(model: Any):
    answer = model.invoke("Hello!")
    assert answer.content == HELLO
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 5


def test_chat_streamed(model: Any):
    chunks = [*model.stream("Hello!")]
    assert "".join(chunk.content for chunk in chunks) == HELLO and len(chunks) > 5
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)


def test_chat_async(model: Any):
    async def talk() -> list[str]:
        texts = [answer.content for answer in await model.abatch(["Hello!"] * 3)]
        return [*texts, "".join([chunk.content async for chunk in model.astream("Hello!")])]

    assert asyncio.run(talk()) == [HELLO] * 4


def test_tools_are_called_and_their_results_are_read(model: Any, fresh: str):
    tooled = model.bind_tools([get_weather])
    history: list[Any] = [messages.HumanMessage(f"{fresh} {QUESTION}")]
    history.append(first := tooled.invoke(history))
    assert arguments(first) == CITIES
    for call in first.tool_calls:
        result = get_weather(**call["args"])
        history.append(messages.ToolMessage(result, tool_call_id=call["id"]))
    second = tooled.invoke(history)
    assert second.content == "It is rainy and dry."
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached == first.usage_metadata["total_tokens"] - 1


def test_a_tool_call_streamed(model: Any):
    whole: Any = None
    for chunk in model.bind_tools([get_weather]).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert arguments(whole) == CITIES


def test_one_tool_at_a_time(model: Any):
    one = model.bind_tools([get_weather], parallel_tool_calls=False)
    assert arguments(one.invoke(QUESTION)) == CITIES[:1]


@pytest.mark.parametrize("choice", ["any", "get_weather"], ids=["any", "named"])
def test_a_call_that_is_required(model: Any, choice: str):
    made = model.bind_tools([get_weather], tool_choice=choice).invoke("Hello!")
    assert arguments(made) == CITIES[:1]


def test_strict_tools(model: Any):
    assert arguments(model.bind_tools([get_weather], strict=True).invoke(QUESTION)) == CITIES


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(model: Any, method: str):
    structured = model.with_structured_output(Person, method=method)
    assert structured.invoke("Who is Nora?") == Person(name="Nora Lund", age=30)


def test_structured_output_streamed(model: Any):
    *_, last = model.with_structured_output(Person).stream("Who is Nora?")
    assert last == Person(name="Nora Lund", age=30)


def test_responses(url: str):
    model = langchain.ChatOpenAI(
        model="scripted",
        base_url=f"{url}/v1",
        api_key="any",
        max_retries=0,
        use_responses_api=True,
    )
    assert model.invoke("Hello!").text == HELLO
    assert "".join(chunk.text for chunk in model.stream("Hello!")) == HELLO
    assert arguments(model.bind_tools([get_weather]).invoke(QUESTION)) == CITIES
