"""Tools with a model whose chat template knows none: told in words, called in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from radixcache import LLM
from radixcache.runtime.tokens.generic_tools import describe_tools
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.runtime.tokens.tool_formats import find_format, knows_tools
from tests.helpers.models import tiny_model
from tests.helpers.scripted import make_tokenizer
from tests.runtime.server.live import LiveServer, live

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
}
CALL = {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Bonn", "days": 2}}}
QUESTION: list[Any] = [{"role": "user", "content": "How will it be?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tiny_model("llama", tmp_path_factory.mktemp("m"), max_position_embeddings=2048)
    with LLM(folder, kv_cache_memory_bytes="16MiB") as llm, live(llm) as server:
        yield server


def test_tools_calls_and_results_are_said_in_words() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "snow", "tool_call_id": "c2"},
    ]
    system, *others = describe_tools(messages, [TOOL])
    assert system["role"] == "system" and system["content"].startswith("Be brief.\n\nYou may call")
    assert json.dumps(TOOL["function"]) in system["content"]
    spelt = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}'
    assert [(one["role"], one["content"]) for one in others] == [
        ("user", "Hi"),
        ("assistant", f"Let me see.\n<tool_call>\n{spelt}\n</tool_call>"),
        (
            "user",
            "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsnow\n</tool_response>",
        ),
    ]
    assert all("tool_calls" not in one for one in others)
    assert describe_tools(messages[:2], []) == messages[:2]


@pytest.mark.parametrize("refused", ["{{ raise_exception('system?') }}", ""])
def test_where_no_system_message_is_taken_the_first_user_tells(refused: str) -> None:
    plain = make_tokenizer()
    plain.chat_template = (
        f"{{% for m in messages %}}{{% if m.role == 'system' %}}{refused}{{% else %}}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer(plain)
    text = tokenizer.render_chat(QUESTION, tools=[TOOL])
    assert text.startswith("<user>You may call") and text.endswith("usual.\n\nHow will it be?")
    assert tokenizer.render_chat(QUESTION) == "<user>How will it be?"


@pytest.mark.parametrize("template", ["{{ tools }}", "{% if tool_call %}", "<function=x>"])
def test_a_template_that_knows_tools_in_an_unknown_form_is_left_alone(template: str) -> None:
    assert knows_tools(template) and find_format(template) is None


def test_a_call_follows_its_schema_and_the_conversation_goes_on_from_its_tokens(server: LiveServer):
    body: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "max_tokens": 400, "seed": 2}
    first = server.post("/v1/chat/completions", body).json()
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    follow = {**body, "messages": [*QUESTION, message, result], "tool_choice": "auto"}
    second = server.post("/v1/chat/completions", {**follow, "max_tokens": 1}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    forced = len("\n</tool_call>")  # at the end: no step computes it
    assert cached >= first["usage"]["total_tokens"] - 2 - forced
