"""pydantic-ai: agents with tools, and answers as classes, over each of the three APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients.rooms import ROOMS, room

ai: Any = pytest.importorskip("pydantic_ai", reason="`make test-clients` has it")
openai_models: Any = pytest.importorskip("pydantic_ai.models.openai")
openai_provider: Any = pytest.importorskip("pydantic_ai.providers.openai")
anthropic_models: Any = pytest.importorskip("pydantic_ai.models.anthropic")
anthropic_provider: Any = pytest.importorskip("pydantic_ai.providers.anthropic")

HELLO = "You are the user, and said: Hello!"
QUESTION = "How is the weather in Oslo and Rome?"

_PROFILE: Any = {"supports_json_schema_output": True}  # it goes by the names of Anthropic's models


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "rainy", "Rome": "dry"}[city]


def chat(url: str) -> Any:
    provider = openai_provider.OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    return openai_models.OpenAIChatModel("scripted", provider=provider)


def responses(url: str) -> Any:
    provider = openai_provider.OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    return openai_models.OpenAIResponsesModel("scripted", provider=provider)


def messages(url: str) -> Any:
    api = anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
    provider = anthropic_provider.AnthropicProvider(anthropic_client=api)
    return anthropic_models.AnthropicModel("scripted", provider=provider, profile=_PROFILE)


@pytest.fixture(params=[chat, responses, messages])
def model(request: pytest.FixtureRequest, url: str) -> Any:
    make: Callable[[str], Any] = request.param
    return make(url)


def test_chat(model: Any):
    answer = ai.Agent(model, instructions="Be kind.").run_sync("Hello!")
    assert answer.output == HELLO and answer.usage.output_tokens > 5


def test_chat_streamed(model: Any):
    async def talk() -> list[str]:
        async with ai.Agent(model).run_stream("Hello!") as answer:
            return [part async for part in answer.stream_text(delta=True, debounce_by=None)]

    parts = asyncio.run(talk())
    assert "".join(parts) == HELLO and len(parts) > 5


def test_tools(model: Any, fresh: str):
    answer = ai.Agent(model, instructions=fresh, tools=[get_weather]).run_sync(QUESTION)
    assert answer.output == "It is rainy and dry."
    first, second = (m.usage for m in answer.all_messages() if m.kind == "response")
    assert second.cache_read_tokens == first.input_tokens + first.output_tokens - 1


def test_tools_streamed(model: Any):
    async def talk() -> str:
        async with ai.Agent(model, tools=[get_weather]).run_stream(QUESTION) as answer:
            told: str = await answer.get_output()
            return told

    assert asyncio.run(talk()) == "It is rainy and dry."


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_an_answer_as_a_class(model: Any, kind: str):
    agent = ai.Agent(model, output_type=getattr(ai, kind)(Person), retries=0)
    assert agent.run_sync("Who is Nora?").output == Person(name="Nora Lund", age=30)


def test_each_of_twenty_tool_turns_computes_its_new_tokens_only(model: Any, fresh: str):
    """What a turn does not find cached is what was not there in the turn before."""
    agent = ai.Agent(model, instructions=fresh, tools=[room])
    answer = agent.run_sync("Walk through the rooms.")
    assert answer.output == "There is no further room."
    turns = [m.usage for m in answer.all_messages() if m.kind == "response"]
    assert len(turns) == ROOMS + 1
    computed = [turn.input_tokens - turn.cache_read_tokens for turn in turns]
    for before, turn in pairwise(turns):
        # The last token that was generated has no KV.
        assert turn.cache_read_tokens == before.input_tokens + before.output_tokens - 1
    prompts = sum(turn.input_tokens for turn in turns)
    print(f"{len(turns)} turns: {prompts} prompt tokens, {sum(computed)} computed: {computed}")
