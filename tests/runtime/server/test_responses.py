"""/v1/responses: OpenAI's own client, what is kept for whom, and why a prompt was not cached."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from radixcache.runtime.demo.script import TABLE
from tests.runtime.server.live import LiveServer

TABLE_TEXT = TABLE.read_text()
FIRST, SECOND = "How old is Mei Tanaka?", "What about Milo Rossi?"
ADA, BOB = {"cache_salt": "Ada's"}, {"cache_salt": "Bob's"}


def ask(client: openai.OpenAI, given: Any = FIRST, **more: Any) -> Any:
    asked = {"instructions": TABLE_TEXT, "temperature": 0, **more}
    return client.responses.create(model="tabletalk", input=given, **asked)


def chat(client: openai.OpenAI, *messages: dict[str, str]) -> str:
    answer = client.chat.completions.create(
        model="tabletalk",
        messages=[{"role": "system", "content": TABLE_TEXT}, *messages],  # type: ignore[list-item]
        temperature=0,
    )
    return str(answer.choices[0].message.content)


def test_a_response_says_what_a_chat_completion_says(client: openai.OpenAI):
    said = chat(client, {"role": "user", "content": FIRST})
    response = ask(client)
    assert (response.status, response.output_text) == ("completed", said)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = response.usage
    details = usage.input_tokens_details
    assert usage.input_tokens == details.cached_tokens + details.cache_write_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert response.instructions == TABLE_TEXT and response.tools == []


def test_a_conversation_goes_on_by_id_or_by_items(client: openai.OpenAI):
    first = ask(client)
    by_id = ask(client, SECOND, previous_response_id=first.id)
    items = [{"role": "user", "content": FIRST}, *first.output, {"role": "user", "content": SECOND}]
    by_items = ask(client, items)
    said = chat(
        client,
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": SECOND},
    )
    assert by_id.output_text == by_items.output_text == said
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    # All of the first turn but its last token, which has no KV, is cached.
    cached = by_id.usage.input_tokens_details.cached_tokens
    assert cached == first.usage.total_tokens - 1


def test_instructions_are_not_inherited(client: openai.OpenAI):
    first = ask(client)
    other = ask(client, SECOND, previous_response_id=first.id, instructions="No table.")
    again = ask(client, SECOND, previous_response_id=first.id)
    assert other.usage.input_tokens < again.usage.input_tokens
    third = ask(client, FIRST, previous_response_id=other.id)
    assert third.usage.input_tokens > again.usage.input_tokens  # its own instructions, once


def test_system_and_developer_messages_at_the_top_are_one(client: openai.OpenAI):
    user = {"role": "user", "content": FIRST}
    parts = [
        {"role": "developer", "content": [{"type": "input_text", "text": TABLE_TEXT}]},
        {"role": "system", "content": "Be brief."},
    ]
    one = ask(client, [user], instructions=f"{TABLE_TEXT}\n\nBe brief.")
    several = ask(client, [*parts, user], instructions=None)
    assert several.usage.input_tokens == one.usage.input_tokens
    assert several.usage.input_tokens_details.cached_tokens == one.usage.input_tokens


def test_a_stream_is_what_the_client_puts_together(client: openai.OpenAI):
    whole = ask(client)
    with client.responses.stream(
        model="tabletalk", input=FIRST, instructions=TABLE_TEXT, temperature=0
    ) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    types = [event.type.removeprefix("response.") for event in events]
    deltas = types.count("output_text.delta")
    assert deltas > 1 and types == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == whole.output_text
    assert client.responses.retrieve(final.id).output_text == text


def test_events_have_their_types_on_lines_of_their_own_and_no_end_mark(server: LiveServer):
    text = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "stream": True}).text
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    assert len(events) > 6
    for name, data in events:
        assert data.startswith('data: {"type":"' + name.removeprefix("event: ") + '"')


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI, stream: bool):
    given = ask(client, max_output_tokens=3, stream=stream)
    response = [*given][-1].response if stream else given
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 3


def test_a_stream_that_fails_says_so_in_a_response(server: LiveServer, client: openai.OpenAI):
    def fail(*_: Any) -> Any:
        raise RuntimeError("the model is broken")

    engine = server.engine
    server.call(lambda: setattr(engine, "step", fail))
    try:
        *_, last = ask(client, stream=True)
    finally:
        server.call(lambda: delattr(engine, "step"))
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"


def test_a_response_is_found_until_it_is_deleted(client: openai.OpenAI):
    response = ask(client)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    for call in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: ask(client, SECOND, previous_response_id=response.id),
        lambda: client.responses.retrieve(ask(client, store=False).id),
    ):
        with pytest.raises(openai.NotFoundError, match="no response 'resp_"):
            call()


def test_nobody_finds_a_response_of_another_salt(server: LiveServer):
    body = {"input": FIRST, "max_output_tokens": 3}
    name = server.post("/v1/responses", {**body, **ADA}).json()["id"]
    path, unknown = f"/v1/responses/{name}", "/v1/responses/resp_0"
    for headers in ({}, {"Cache-Salt": "Bob's"}):
        told, nothing = (server.get(p, headers=headers) for p in (path, unknown))
        assert told.status_code == nothing.status_code == 404
        assert told.text.replace(name, "ID") == nothing.text.replace("resp_0", "ID")
    for salt in ({}, BOB):
        own = {"previous_response_id": name, "prompt_cache_options": {}}
        assert server.post("/v1/responses", {**body, **own, **salt}).status_code == 404
        compared = {"prompt_cache_options": {"comparison_response_id": name}}
        answer = server.post("/v1/responses", {**body, **compared, **salt}).json()
        assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert server.get(path, headers={"Cache-Salt": "Ada's"}).json()["id"] == name
    goes_on = server.post("/v1/responses", {**body, **ADA, "previous_response_id": name})
    assert goes_on.status_code == 200


def compare(client: openai.OpenAI, first: Any, **more: Any) -> Any:
    options = {"comparison_response_id": first.id}
    response = ask(client, prompt_cache_options=options, extra_body=ADA, **more)
    return response, response.prompt_cache_diagnostics


def test_it_says_why_a_prompt_was_not_cached(server: LiveServer, client: openai.OpenAI):
    first = ask(client, extra_body=ADA)
    _, told = compare(client, first, given=SECOND, previous_response_id=first.id)
    assert told.type == "cache_hit"
    changed, told = compare(client, first, instructions=f"It is 10:41.\n{TABLE_TEXT}")
    assert (told.type, told.reason) == ("cache_miss", "input_changed")
    assert told.comparison_reusable_tokens == first.usage.input_tokens
    cached = changed.usage.input_tokens_details.cached_tokens
    assert told.cache_missed_tokens == changed.usage.input_tokens - cached
    (miss,) = changed.radixcache["explanation"]
    assert miss["reason"] == "diverged" and "10:4" in miss["text"]
    # Nothing changed, but it is no longer there.
    assert server.post("/v1/cache/flush").status_code == 200
    evicted, told = compare(client, first)
    assert told.type == "unavailable"
    assert evicted.radixcache["explanation"][0]["reason"] == "evicted"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"background": True}, "background: not supported: keep the connection open"),
        ({"conversation": "conv_1"}, "conversation: not supported"),
        ({"prompt": {"id": "p"}}, "prompt: not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include.0: Input should be"),
        ({"truncation": "auto"}, "truncation: Input should be 'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"text": {"verbosity": "low"}}, "verbosity: not supported: say it in the instructions"),
        ({"prompt_cache_options": {"prewarm": True}}, "POST /v1/prefixes"),
        ({"top_logprobs": 3}, "/v1/chat/completions has log-probabilities"),
        ({"temprature": 1}, "temprature: there is no such field: did you mean temperature?"),
        ({"max_output_tokens": 0}, "max_output_tokens: Input should be greater"),
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": [{"role": "user"}]}, "input.0: a message has a 'content'"),
        ({"input": [{"type": "input_image"}]}, "input.0.type: Input should be"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "has a 'call_id'"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"store": "perhaps"}, "store: Input should be a valid boolean"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(
    server: LiveServer, body: dict[str, Any], sentence: str
):
    response = server.post("/v1/responses", {"input": "a", **body})
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]
    assert "\n" not in response.json()["error"]["message"]
