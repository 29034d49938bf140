"""LiteLLM, which makes requests of one shape into those of many providers."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
litellm: Any = pytest.importorskip("litellm", reason="`make test-clients` has it")

HELLO = "You are the user, and said: Hello!"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    return {"model": f"{request.param}/scripted", "api_base": f"{url}/v1", "api_key": "any"}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chat(options: Any):
    answer = litellm.completion(messages=user("Hello!"), **options)
    assert answer.choices[0].message.content == HELLO and answer.usage.completion_tokens > 5


def test_chat_streamed(options: Any):
    parts = [*litellm.completion(messages=user("Hello!"), stream=True, **options)]
    deltas = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(deltas) == HELLO and len(deltas) > 5


def test_chat_async(options: Any):
    answer = asyncio.run(litellm.acompletion(messages=user("Hello!"), **options))
    assert answer.choices[0].message.content == HELLO


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_are_called_and_their_results_are_read(options: Any, stream: bool):
    question = user("How is the weather in Oslo and Rome?")
    more: Any = {"tools": [WEATHER], **options}
    first = litellm.completion(messages=question, stream=stream, **more)
    if stream:
        first = litellm.stream_chunk_builder([*first], messages=question)
    message = first.choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Oslo", "Rome"]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": weather}
        for call, weather in zip(message.tool_calls, ("rainy", "dry"), strict=True)
    ]
    second = litellm.completion(messages=[*question, message.model_dump(), *results], **more)
    assert second.choices[0].message.content == "It is rainy and dry."


def test_a_call_that_is_required(options: Any):
    answer = litellm.completion(
        messages=user("Hello!"), tools=[WEATHER], tool_choice="required", **options
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def test_an_answer_by_a_schema(options: Any):
    answer = litellm.completion(messages=user("Who is Nora?"), response_format=Person, **options)
    told = Person.model_validate_json(answer.choices[0].message.content)
    assert told == Person(name="Nora Lund", age=30)


def test_anthropics_api(url: str):
    answer = litellm.completion(
        model="anthropic/scripted", api_base=url, api_key="any", messages=user("Hello!")
    )
    assert answer.choices[0].message.content == HELLO
