"""instructor: an answer as a class."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

instructor: Any = pytest.importorskip("instructor", reason="`make test-clients` has it")


class Person(BaseModel):
    """A person of whom one asks."""

    name: str
    age: int


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


NORA = {"name": "Nora Lund", "age": 30}  # as a subclass of Person, perhaps
ASKED: Any = {"model": "scripted", "messages": [{"role": "user", "content": "Who is Nora?"}]}
MODES = ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"]


@pytest.fixture
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_as_a_class(api: Any, mode: str):
    client = instructor.from_openai(api, mode=instructor.Mode[mode])
    told = client.chat.completions.create(response_model=Person, max_retries=0, **ASKED)
    assert told.model_dump() == NORA


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_parts_of_an_answer_streamed(api: Any, mode: str):
    client = instructor.from_openai(api, mode=instructor.Mode[mode])
    parts = [*client.chat.completions.create_partial(response_model=Person, **ASKED)]
    assert parts[-1].model_dump() == NORA and len(parts) > 2


def test_several_tools_in_parallel(api: Any):
    client = instructor.from_openai(api, mode=instructor.Mode.PARALLEL_TOOLS)
    question = {"role": "user", "content": "Who is Nora?"}
    told = client.chat.completions.create(
        model="scripted", messages=[question], response_model=Iterable[Person | GetWeather]
    )
    assert [one.model_dump() for one in told] == [NORA]


def test_an_answer_as_a_class_async(url: str):
    async def talk() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as api:
            client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
            return await client.chat.completions.create(response_model=Person, **ASKED)

    assert asyncio.run(talk()).model_dump() == NORA


def test_responses(api: Any):
    client = instructor.from_openai(api, mode=instructor.Mode.RESPONSES_TOOLS)
    told = client.responses.create(model="scripted", input="Who is Nora?", response_model=Person)
    assert told.model_dump() == NORA


def test_anthropics_api(url: str):
    anthropic = pytest.importorskip("anthropic")
    api = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    client = instructor.from_anthropic(api, mode=instructor.Mode.ANTHROPIC_TOOLS)
    told = client.messages.create(response_model=Person, max_tokens=500, **ASKED)
    assert told.model_dump() == NORA
