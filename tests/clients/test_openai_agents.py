"""OpenAI's Agents SDK, over both APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

agents: Any = pytest.importorskip("agents", reason="`make test-clients` has it")
agents.set_tracing_disabled(True)  # it would go to OpenAI

HELLO = "You are the user, and said: Hello!"
QUESTION = "How is the weather in Oslo and Rome?"


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "rainy", "Rome": "dry"}[city]


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, url: str) -> Any:
    api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    return getattr(agents, request.param)(model="scripted", openai_client=api)


@pytest.fixture
def tools() -> list[Any]:
    return [agents.function_tool(get_weather)]


def test_chat(model: Any):
    agent = agents.Agent(name="one", instructions="Be kind.", model=model)
    assert agents.Runner.run_sync(agent, "Hello!").final_output == HELLO


def test_chat_streamed(model: Any):
    async def talk() -> tuple[int, str]:
        result = agents.Runner.run_streamed(agents.Agent(name="one", model=model), "Hello!")
        events = [event async for event in result.stream_events()]
        return len(events), result.final_output

    count, told = asyncio.run(talk())
    assert told == HELLO and count > 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools(model: Any, tools: list[Any], fresh: str, stream: bool):
    settings = agents.ModelSettings(include_usage=True)
    agent = agents.Agent(
        name="one", instructions=fresh, model=model, tools=tools, model_settings=settings
    )

    async def talk() -> Any:
        if not stream:
            return await agents.Runner.run(agent, QUESTION)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(talk())
    assert result.final_output == "It is rainy and dry."
    first, second = (answer.usage for answer in result.raw_responses)
    assert second.input_tokens_details.cached_tokens == first.total_tokens - 1


def test_a_call_that_is_required(model: Any, tools: list[Any]):
    settings = agents.ModelSettings(tool_choice="required")
    agent = agents.Agent(
        name="one",
        model=model,
        tools=tools,
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    assert agents.Runner.run_sync(agent, "Hello!").final_output == "rainy"


def test_an_answer_as_a_class(model: Any):
    agent = agents.Agent(name="one", model=model, output_type=Person)
    told = agents.Runner.run_sync(agent, "Who is Nora?").final_output
    assert told == Person(name="Nora Lund", age=30)
