"""/v1/messages: what Anthropic's API has alone, its `cache_control`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixcache.runtime.demo.script import TABLE
from tests.runtime.server.api.apis import WEATHER, Messages, user
from tests.runtime.server.live import LiveServer

SYSTEM = [{"type": "text", "text": TABLE.read_text()}]
FIRST, SECOND = user("How old is Mei Tanaka?"), user("What about Milo Rossi?")
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture
def messages(server: LiveServer) -> Iterator[Any]:
    with Messages(server.url, False).client() as client:
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


def as_param(message: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.to_dict() for block in message.content]}


def all_tokens(message: Any) -> int:
    usage = message.usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return int(usage.input_tokens + read + written + usage.output_tokens)


def test_the_prompt_is_that_of_a_chat_completion(messages: Any, server: LiveServer):
    chat = [{"role": "system", "content": SYSTEM[0]["text"]}, FIRST]
    body = {"messages": chat, "temperature": 0}
    said = server.post("/v1/chat/completions", body).json()
    message = ask(messages)
    assert message.content[0].text == said["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    stopped = ask(messages, stop_sequences=["Mei"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Mei")
    with messages.stream(model="tabletalk", max_tokens=32, messages=[FIRST]) as stream:
        events = dict.fromkeys(event.type for event in stream if event.type != "text")
    assert [*events] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    tokens = said["usage"]["prompt_tokens"]
    assert ask(messages, system=SYSTEM[0]["text"]).usage.cache_read_input_tokens == tokens
    counted = messages.count_tokens(model="tabletalk", system=SYSTEM, messages=[FIRST])
    assert counted.input_tokens == tokens


def test_a_message_that_is_begun_goes_on(scripted: LiveServer):
    begun = [user("Hi"), {"role": "assistant", "content": "us"}]
    assert Messages(scripted.url, False).ask(*begun).text == "er: Hi"


def test_an_error_of_a_tool_is_told_to_the_model(scripted: LiveServer):
    api, question = Messages(scripted.url, False), user("Oslo?")
    first = api.ask(question, tools=[WEATHER])
    result = api.result(first.calls[0], "closed")
    result["content"][0]["is_error"] = True
    assert api.ask(question, *first.said, result, tools=[WEATHER]).text == "It is Error: closed"


def test_tokens_are_counted_up_to_the_last_breakpoint(messages: Any, server: LiveServer):
    server.call(server.engine.reset_cache)
    plain = ask(messages, extra_body={"cache_salt": "plain"}).usage
    assert plain.cache_creation_input_tokens == plain.cache_read_input_tokens == 0
    system = [{**SYSTEM[0], "cache_control": EPHEMERAL}]
    first = ask(messages, marked(FIRST), system=system)
    second = ask(messages, FIRST, as_param(first), marked(SECOND), system=system)
    for usage, cached in ((first.usage, 0), (second.usage, all_tokens(first) - 1)):
        assert usage.cache_read_input_tokens == cached
        # The template asks for the answer in one token behind the last message.
        assert usage.input_tokens == 1 and usage.cache_creation_input_tokens > 0
    assert all_tokens(first) == plain.input_tokens + plain.output_tokens


def test_a_breakpoint_within_a_message_is_found_to_the_token(messages: Any, server: LiveServer):
    text = "Mei Tanaka is 64.\nMilo Rossi is 56."
    (block,) = marked(user(text))["content"]
    question = {"type": "text", "text": "How old is Mei Tanaka?"}
    usage = ask(messages, {"role": "user", "content": [block, question]}, system="").usage
    rest = server.backend.tokenizer.encode("\nHow old is Mei Tanaka?", special=False)
    # Behind the breakpoint: the rest of the message, its end, and the token that asks.
    assert usage.input_tokens == len(rest) + 2


def test_the_line_that_changes_with_each_request_is_dropped(messages: Any):
    def system(number: int) -> list[dict[str, str]]:
        return [{"type": "text", "text": f"x-anthropic-billing-header: {number}"}, *SYSTEM]

    ask(messages, system=system(1))
    again = ask(messages, system=system(2))
    assert again.usage.cache_read_input_tokens == all_tokens(again) - again.usage.output_tokens


def test_what_is_marked_is_pinned_and_a_flush_asks_nobody(messages: Any, server: LiveServer):
    server.call(server.engine.reset_cache)
    (system,) = marked(user("| Mei Tanaka | 64 |"), ttl="1h")["content"]
    body = {"max_tokens": 1, "system": [system], "messages": [marked(FIRST)]}
    usage = server.post("/v1/messages?beta=true", body).json()["usage"]  # as the stock beta client
    first, whole = server.get("/v1/prefixes").json()["data"]
    assert whole["num_tokens"] == usage["cache_creation_input_tokens"] > first["num_tokens"] > 0
    assert whole["expires_in"] <= 300 < first["expires_in"] <= 3600
    assert server.get("/v1/prefixes", headers={"Cache-Salt": "Ada's"}).json()["data"] == []
    assert server.post("/v1/cache/flush").status_code == 200
    assert server.get("/v1/prefixes").json()["data"] == []
