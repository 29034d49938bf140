"""Clients of all kinds against one server. What the stock clients see of its APIs in detail is in
`tests/runtime/server`; here it is whether they get through what people use them for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.adapters import (
    ADAPTERS,
    QUESTION,
    Person,
    PydanticAI,
    PydanticAIMessages,
    PydanticAIResponses,
)

ROOMS = 20
HELLO = "You are the user, and said: Hello!"


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.__name__)
def client(request: pytest.FixtureRequest, url: str) -> Any:
    return request.param(url)


def room(number: int) -> str:
    """What is in the room of this number, and where to go next."""
    further = f"; the next is {number + 1}" if number < ROOMS else ""
    return f"Room {number}: a table with {number * 7} chairs{further}."


def able(way: Any) -> Any:
    if way is None:
        pytest.skip("that is not what it is for")
    return way


def test_chat(client: Any):
    assert able(client.chat)("Hello!") == HELLO


def test_chat_streamed(client: Any):
    parts = able(client.stream)("Hello!")
    assert "".join(parts) == HELLO and len(parts) > 5


def test_tools_are_called_and_their_results_are_read(client: Any, fresh: str):
    assert able(client.tools)(f"{fresh} {QUESTION}") == "It is rainy and dry."


def test_an_answer_as_a_class(client: Any):
    assert able(client.parsed)("Who is Nora?") == Person(name="Nora Lund", age=30)


@pytest.mark.parametrize("kind", [PydanticAI, PydanticAIResponses, PydanticAIMessages])
def test_each_of_twenty_tool_turns_computes_its_new_tokens_only(kind: Any, url: str, fresh: str):
    """All of a turn is cached in the next one but its last token, which has no KV."""
    agent = kind(url).agent(instructions=fresh, tools=[room])
    answer = agent.run_sync("Walk through the rooms.")
    assert answer.output == "There is no further room."
    turns = [m.usage for m in answer.all_messages() if m.kind == "response"]
    assert len(turns) == ROOMS + 1
    cached = [turn.cache_read_tokens for turn in turns[1:]]
    assert cached == [turn.input_tokens + turn.output_tokens - 1 for turn in turns[:-1]]
