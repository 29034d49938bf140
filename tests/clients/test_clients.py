"""Clients of all kinds against one server. What the stock clients see of its APIs in detail is in
`tests/runtime/server`; here it is whether they get through what people use them for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.adapters import ADAPTERS, QUESTION, Person

HELLO = "You are the user, and said: Hello!"


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.__name__)
def client(request: pytest.FixtureRequest, url: str) -> Any:
    return request.param(url)


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
