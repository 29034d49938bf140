"""LlamaIndex's model class for APIs like OpenAI's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

like: Any = pytest.importorskip("llama_index.llms.openai_like", reason="`make test-clients` has it")
types: Any = pytest.importorskip("llama_index.core.llms", reason="`make test-clients` has it")
tools: Any = pytest.importorskip("llama_index.core.tools", reason="`make test-clients` has it")
agents: Any = pytest.importorskip("llama_index.core.agent.workflow")

HELLO = "You are the user, and said: Hello!"
QUESTION = "How is the weather in Oslo and Rome?"


class Person(BaseModel):
    """A person of whom one asks."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "rainy", "Rome": "dry"}[city]


@pytest.fixture
def model(url: str) -> Any:
    return like.OpenAILike(
        model="scripted",
        api_base=f"{url}/v1",
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_retries=0,
    )


@pytest.fixture
def weather() -> Any:
    return tools.FunctionTool.from_defaults(get_weather)


def user(text: str) -> list[Any]:
    return [types.ChatMessage(role="user", content=text)]


def test_chat(model: Any):
    assert model.chat(user("Hello!")).message.content == HELLO
    assert model.complete("Hello!").text == HELLO


def test_chat_streamed(model: Any):
    deltas = [part.delta or "" for part in model.stream_chat(user("Hello!"))]
    assert "".join(deltas) == HELLO and len(deltas) > 5


def test_chat_async(model: Any):
    async def talk() -> list[str]:
        whole = (await model.achat(user("Hello!"))).message.content
        stream = await model.astream_chat(user("Hello!"))
        return [whole, "".join([part.delta or "" async for part in stream])]

    assert asyncio.run(talk()) == [HELLO, HELLO]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_are_called_and_their_results_are_read(model: Any, weather: Any, stream: bool):
    options: Any = {"user_msg": QUESTION, "allow_parallel_tool_calls": True}
    if stream:
        *_, first = model.stream_chat_with_tools([weather], **options)
    else:
        first = model.chat_with_tools([weather], **options)
    calls = model.get_tool_calls_from_response(first)
    assert [(c.tool_name, c.tool_kwargs["city"]) for c in calls] == [
        ("get_weather", "Oslo"),
        ("get_weather", "Rome"),
    ]
    history = [*user(QUESTION), first.message]
    for call in calls:
        kwargs = {"tool_call_id": call.tool_id}
        result = get_weather(**call.tool_kwargs)
        history.append(types.ChatMessage(role="tool", content=result, additional_kwargs=kwargs))
    second = model.chat_with_tools([weather], chat_history=history)
    assert second.message.content == "It is rainy and dry."


def test_one_tool_at_a_time(model: Any, weather: Any):
    answer = model.chat_with_tools([weather], user_msg=QUESTION, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"city": "Oslo"}


def test_a_call_that_is_required(model: Any, weather: Any):
    answer = model.chat_with_tools([weather], user_msg="Hello!", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"city": "Oslo"}


def test_an_agent(model: Any):
    async def talk() -> str:
        agent = agents.FunctionAgent(tools=[get_weather], llm=model, system_prompt="Be kind.")
        return str(await agent.run(QUESTION))

    assert asyncio.run(talk()) == "It is rainy and dry."


def test_predict_and_call(model: Any, weather: Any):
    told = model.predict_and_call([weather], user_msg="How is the weather in Rome?")
    assert str(told) == "dry"


@pytest.mark.parametrize("by_schema", [True, False], ids=["json schema", "tools"])
def test_structured_output(model: Any, by_schema: bool):
    model.should_use_structured_outputs = by_schema
    structured = model.as_structured_llm(Person)
    assert structured.chat(user("Who is Nora?")).raw == Person(name="Nora Lund", age=30)
