"""Structured output over HTTP: OpenAI's fields, vLLM's, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from tests.runtime.server.http import post
from tests.runtime.server.live import LiveServer, ask

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
QUESTION: Any = ask("Who is it?")


def test_a_schema_is_followed_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tabletalk", "messages": QUESTION, "response_format": BY_SCHEMA,
        "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked, n=2).choices
    for choice in whole:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"response_format": {"type": "text"}}, r".*"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{"name":".*","old":\w+\}'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, r"\{.*"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"name":".*","old":\w+\}'),
        ({"structured_outputs": {"regex": "c{2}"}}, "cc"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
    ],
)
def test_every_way_to_ask_holds_for_chat_and_for_completions(
    server: LiveServer, fields: dict[str, Any], form: str
) -> None:
    more = {"temperature": 0, "max_tokens": 40, **fields}
    chat = post(f"{server.url}/v1/chat/completions", json={"messages": QUESTION, **more}).json()
    plain = post(f"{server.url}/v1/completions", json={"prompt": "It is ", **more}).json()
    for text in (chat["choices"][0]["message"]["content"], plain["choices"][0]["text"]):
        assert re.fullmatch(form, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"structured_outputs": {"json": {"not": {}}}},
            "json does not compile: Unimpl",
        ),
        ({"structured_outputs": {"regex": "("}}, "regex does not compile"),
        ({"response_format": {"type": "xml"}}, "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "the json_schema is missing"),
        ({"structured_outputs": {}}, "none is given of json, regex, choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported; give"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "is not supported"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "2 forms of the answer"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": BY_SCHEMA},
            "2 forms of the answer",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "choice: List should have at least",
        ),
        ({"structured_outputs": {"json": False}}, "no JSON is of the schema false"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(
    server: LiveServer, fields: dict[str, Any], sentence: str
) -> None:
    for path, body in (
        ("chat/completions", {"messages": QUESTION}),
        ("completions", {"prompt": "?"}),
    ):
        answer = post(f"{server.url}/v1/{path}", json={**body, **fields})
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
    server.assert_idle()
