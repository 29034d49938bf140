"""/v1/messages: Anthropic's own client, its cache_control, and why a prompt was not cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from radixcache import LLM
from radixcache.runtime.demo.script import TABLE
from tests.runtime.server.live import LiveServer, live

SYSTEM = [{"type": "text", "text": TABLE.read_text()}]
FIRST = {"role": "user", "content": "How old is Mei Tanaka?"}
SECOND = {"role": "user", "content": "What about Milo Rossi?"}
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture
def messages(server: LiveServer) -> Iterator[Any]:
    with (
        anthropic.DefaultHttpxClient(verify=False) as plain,
        anthropic.Anthropic(
            base_url=server.url, api_key="any", max_retries=0, http_client=plain
        ) as client,
    ):
        yield client.messages
    server.call(server.backend.llm.prefixes.drop_yielding)
    server.assert_idle()


def ask(messages: Any, *conversation: Any, **more: Any) -> Any:
    extra = {"temperature": 0, "cache_salt": "Ada's", **more.pop("extra_body", {})}
    return messages.create(
        **{"model": "tabletalk", "max_tokens": 32, "system": SYSTEM, **more},
        messages=[*conversation] or [FIRST],
        extra_body=extra,
    )


def marked(message: dict[str, Any], **control: Any) -> dict[str, Any]:
    text = {"type": "text", "text": message["content"], "cache_control": {**EPHEMERAL, **control}}
    return {**message, "content": [text]}


def test_a_message_says_what_a_chat_completion_says(messages: Any, client: openai.OpenAI):
    said = client.chat.completions.create(
        model="tabletalk",
        messages=[{"role": "system", "content": SYSTEM[0]["text"]}, FIRST],  # type: ignore[list-item]
        temperature=0,
    )
    assert said.usage is not None
    message = ask(messages)
    assert message.content[0].text == said.choices[0].message.content
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    plain = ask(messages, system=SYSTEM[0]["text"])
    assert plain.usage.cache_read_input_tokens == said.usage.prompt_tokens  # the same prompt
    counted = messages.count_tokens(model="tabletalk", system=SYSTEM, messages=[FIRST])
    assert counted.input_tokens == said.usage.prompt_tokens


def test_a_stream_is_what_the_client_puts_together(messages: Any, server: LiveServer):
    whole = ask(messages)
    with messages.stream(
        model="tabletalk",
        max_tokens=32,
        system=SYSTEM,
        messages=[FIRST],
        extra_body={"temperature": 0},
    ) as stream:
        events = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    deltas = events.count("content_block_delta")
    assert deltas > 1 and events == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "end_turn"


def test_a_stream_that_fails_says_so_in_an_event(messages: Any, server: LiveServer):
    def fail(*_: Any) -> Any:
        raise RuntimeError("the model is broken")

    server.call(lambda: setattr(server.engine, "step", fail))
    try:
        with pytest.raises(anthropic.APIStatusError, match="the engine failed: RuntimeError"):
            [*ask(messages, stream=True)]
    finally:
        server.call(lambda: delattr(server.engine, "step"))


def test_why_it_ends(messages: Any):
    cut = ask(messages, max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = ask(messages, stop_sequences=["Mei"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Mei")
    assert stopped.content[0].text == "The age of "


def test_tokens_are_counted_up_to_the_last_breakpoint(messages: Any, server: LiveServer):
    server.call(server.engine.reset_cache)
    plain = ask(messages, extra_body={"cache_salt": "plain"}).usage
    assert plain.cache_creation_input_tokens == plain.cache_read_input_tokens == 0
    system = [{**SYSTEM[0], "cache_control": EPHEMERAL}]
    first = ask(messages, marked(FIRST), system=system)
    second = ask(
        messages,
        FIRST,
        as_param(first),
        marked(SECOND),
        system=system,
    )
    for usage, cached in ((first.usage, 0), (second.usage, first_tokens(first) - 1)):
        assert usage.cache_read_input_tokens == cached
        # The template asks for the answer in one token behind the last message.
        assert usage.input_tokens == 1 and usage.cache_creation_input_tokens > 0
    assert first_tokens(first) == plain.input_tokens + plain.output_tokens


def as_param(message: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.to_dict() for block in message.content]}


def first_tokens(message: Any) -> int:
    usage = message.usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return int(usage.input_tokens + read + written + usage.output_tokens)


def test_a_breakpoint_within_a_message_is_found_to_the_token(messages: Any, server: LiveServer):
    blocks = [
        {
            "type": "text",
            "text": "Mei Tanaka is 64.\nMilo Rossi is 56.",
            "cache_control": EPHEMERAL,
        },
        {"type": "text", "text": "How old is Mei Tanaka?"},
    ]
    usage = ask(messages, {"role": "user", "content": blocks}, system="").usage
    tokenizer = server.backend.tokenizer
    rest = tokenizer.encode("\nHow old is Mei Tanaka?", special=False)
    # Behind the breakpoint: the rest of the message, its end, and the token that asks.
    assert usage.input_tokens == len(rest) + 2


def test_the_line_that_changes_with_each_request_is_dropped(messages: Any):
    def system(number: int) -> list[dict[str, str]]:
        return [{"type": "text", "text": f"x-anthropic-billing-header: {number}"}, *SYSTEM]

    ask(messages, system=system(1))
    again = ask(messages, system=system(2))
    assert again.usage.cache_read_input_tokens == first_tokens(again) - again.usage.output_tokens


def test_it_says_why_a_prompt_was_not_cached(messages: Any, server: LiveServer):
    def compare(*conversation: Any, **more: Any) -> Any:
        message = ask(messages, *conversation, diagnostics={"previous_message_id": name}, **more)
        return message, message.diagnostics and message.diagnostics.cache_miss_reason

    first = ask(messages, diagnostics={"previous_message_id": None})
    name, prompt = first.id, first_tokens(first) - first.usage.output_tokens
    assert first.diagnostics is None
    _, reason = compare(FIRST, as_param(first), SECOND)
    assert reason is None
    changed, reason = compare(system=[{"type": "text", "text": "At 10:41."}, *SYSTEM])
    assert reason.type == "system_changed"
    assert reason.cache_missed_input_tokens == prompt - changed.usage.cache_read_input_tokens
    assert changed.radixcache["explanation"][0]["reason"] == "diverged"
    changed, reason = compare({**FIRST, "content": "How tall is Mei Tanaka?"})
    assert reason.type == "messages_changed" and 0 < reason.cache_missed_input_tokens < 10
    server.call(server.engine.reset_cache)
    evicted, reason = compare()
    assert reason.type == "unavailable"
    assert evicted.radixcache["explanation"][0]["reason"] == "evicted"
    for other in ("msg_0", ask(messages).id):  # never sent; sent without diagnostics
        name = other
        assert compare()[1].type == "previous_message_not_found"
    name = first.id
    assert compare(extra_body={"cache_salt": "Bob's"})[1].type == "previous_message_not_found"


def test_what_is_marked_is_pinned_and_a_flush_asks_nobody(messages: Any, server: LiveServer):
    server.call(server.engine.reset_cache)
    body = {
        "max_tokens": 1,
        "system": [
            {
                "type": "text",
                "text": "| Mei Tanaka | 64 |",
                "cache_control": {**EPHEMERAL, "ttl": "1h"},
            }
        ],
        "messages": [marked(FIRST)],
    }
    usage = server.post("/v1/messages", body).json()["usage"]
    system, whole = server.get("/v1/prefixes").json()["data"]
    assert whole["num_tokens"] == usage["cache_creation_input_tokens"] > system["num_tokens"] > 0
    assert whole["expires_in"] <= 300 < system["expires_in"] <= 3600
    assert server.get("/v1/prefixes", headers={"Cache-Salt": "Ada's"}).json()["data"] == []
    assert server.post("/v1/cache/flush").status_code == 200
    assert server.get("/v1/prefixes").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"container": "c"}, "container: not supported: run the tools yourself"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools.0."),
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages.0.role: Input should be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text has a 'text'"),
        ({"messages": [marked(FIRST)] * 5}, "4 places at most"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "cache_control.ttl"),
        ({"thinking": {"type": "hard"}}, "thinking.type: Input should be"),
        ({"stop_sequences": "\n"}, "stop_sequences: Input should be a valid list"),
        ({"systen": "a"}, "systen: there is no such field: did you mean system?"),
        ({"temperature": -1}, "temperature: Input should be greater"),
        ({"diagnostics": {"previous": "1"}}, "diagnostics.previous: there is no such field"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(
    server: LiveServer, body: dict[str, Any], sentence: str
):
    response = server.post("/v1/messages", {"max_tokens": 1, "messages": [FIRST], **body})
    error = response.json()
    assert response.status_code == 400 and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert sentence in error["error"]["message"] and "\n" not in error["error"]["message"]


def test_keys_and_errors_are_anthropics_at_its_paths() -> None:
    body: Any = {"max_tokens": 1, "messages": [FIRST]}
    with live(LLM(kv_cache_memory_bytes="8MiB"), api_key="the key", max_body_size=1000) as server:

        def send(body: Any, path: str = "/v1/messages", **headers: str) -> tuple[int, Any]:
            response = server.post(path, body, headers=headers)
            return response.status_code, response.json().get("error", {}).get("type")

        key = {"x-api-key": "the key", "anthropic-version": "2023-06-01"}
        assert send(body, **key)[0] == send(body, Authorization="Bearer the key")[0] == 200
        assert send(body, **{**key, "Authorization": "Bearer another"})[0] == 200
        for headers in ({}, {"x-api-key": "another"}, {"x-api-key": ""}):
            assert send(body, **headers) == (401, "authentication_error")
            count = send(body, "/v1/messages/count_tokens", **headers)
            assert count == (401, "authentication_error")
            assert send(body, "/v1/responses", **headers) == (401, "invalid_request_error")
        assert send({**body, "model": "claude"}, **key) == (404, "not_found_error")
        assert send({**body, "system": "x" * 1000}, **key) == (413, "request_too_large")
        client = anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0)
        with client, pytest.raises(anthropic.AuthenticationError, match="a valid API key"):
            client.messages.create(model="tabletalk", **body)
