"""/v1/responses: what is kept for whom."""

from __future__ import annotations

import re
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from radixcache import LLM
from radixcache.runtime.demo.script import TABLE
from radixcache.runtime.server.api.response_store import ResponseStore, StoredResponse
from tests.runtime.server.api.apis import WEATHER, Responses, user
from tests.runtime.server.live import LiveServer, live

TABLE_TEXT = TABLE.read_text()
FIRST, SECOND = "How old is Mei Tanaka?", "What about Milo Rossi?"
ADA, BOB = {"cache_salt": "Ada's"}, {"cache_salt": "Bob's"}


def ask(client: openai.OpenAI, given: Any = FIRST, **more: Any) -> Any:
    asked = {"instructions": TABLE_TEXT, "temperature": 0, **more}
    return client.responses.create(model="tabletalk", input=given, **asked)


def chat(client: openai.OpenAI, *messages: Any) -> str:
    system: Any = {"role": "system", "content": TABLE_TEXT}
    answer = client.chat.completions.create(
        model="tabletalk", messages=[system, *messages], temperature=0
    )
    return str(answer.choices[0].message.content)


def test_a_conversation_goes_on_by_id_or_by_items(client: openai.OpenAI):
    first = ask(client)
    by_id = ask(client, SECOND, previous_response_id=first.id)
    by_items = ask(client, [user(FIRST), *first.output, user(SECOND)])
    answer = {"role": "assistant", "content": first.output_text}
    said = chat(client, user(FIRST), answer, user(SECOND))
    assert by_id.output_text == by_items.output_text == said
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    more: Any = {"instructions": TABLE_TEXT, "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(model="tabletalk", input=SECOND, **more)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == by_id.usage.input_tokens
    details = first.usage.input_tokens_details
    assert first.usage.input_tokens == details.cached_tokens + details.cache_write_tokens
    assert by_id.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_a_request_without_input_is_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        client.responses.create(model="tabletalk")


def test_results_of_tools_go_on_by_id(scripted: LiveServer):
    api = Responses(scripted.url, False)
    first = api.ask(user("Oslo, by id"), tools=[WEATHER])
    result = api.result(first.calls[0], "7°")
    second = api.ask(result, tools=[WEATHER], previous_response_id=first.whole.id)
    assert second.text == "It is 7°" and second.cached == first.prompt + first.completion - 1


def test_instructions_are_not_inherited(client: openai.OpenAI):
    first = ask(client)
    other = ask(client, SECOND, previous_response_id=first.id, instructions="No table.")
    again = ask(client, SECOND, previous_response_id=first.id)
    assert other.usage.input_tokens < again.usage.input_tokens
    third = ask(client, FIRST, previous_response_id=other.id)
    assert third.usage.input_tokens > again.usage.input_tokens  # its own instructions, once


def test_system_and_developer_messages_at_the_top_are_one(client: openai.OpenAI):
    table = [{"type": "input_text", "text": TABLE_TEXT}]
    parts = [{"role": "developer", "content": table}, {"role": "system", "content": "Be brief."}]
    one = ask(client, [user(FIRST)], instructions=f"{TABLE_TEXT}\n\nBe brief.")
    several = ask(client, [*parts, user(FIRST)], instructions=None)
    assert several.usage.input_tokens == one.usage.input_tokens
    assert several.usage.input_tokens_details.cached_tokens == one.usage.input_tokens


def test_events_are_numbered_and_have_lines_of_their_types(
    client: openai.OpenAI, server: LiveServer
):
    with client.responses.stream(model="tabletalk", input=FIRST, temperature=0) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert client.responses.retrieve(final.id).output_text == final.output_text
    text = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "stream": True}).text
    names = re.findall("event: response.(.*)", text)
    assert [*dict.fromkeys(names)] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "incomplete",
    ]
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert data.startswith('data: {"type":"' + name.removeprefix("event: ") + '"')


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
    assert server.get(path, headers={"Cache-Salt": "Ada's"}).json()["id"] == name
    goes_on = server.post("/v1/responses", {**body, **ADA, "previous_response_id": name})
    assert goes_on.status_code == 200


def stored(text: str, salt: str | None = None) -> StoredResponse:
    return StoredResponse([user(text)], {}, salt)


def test_the_salt_that_has_most_loses_its_oldest_response():
    store = ResponseStore(max_bytes=50_000)
    store.keep("small", stored("x" * 500, salt="a"))
    for i in range(20):
        store.keep(f"{i}", stored("y" * 1000, salt="b"))
    found = [i for i in range(20) if store.find(f"{i}", "b")]
    assert store.find("small", "a") and found == [*range(20 - len(found), 20)] and len(found) > 5
    shown = {"type": "image_url", "image_url": {"url": "z" * 60_000}}
    kept = store.keep("large", StoredResponse([user([shown])], {}, "c"))
    assert kept is not None and kept.exception() is not None
    assert store.find("large", "c") is None and store.find("small", "a")


def test_short_responses_are_counted_with_all_that_they_take():
    store = ResponseStore()
    tracemalloc.start()
    try:
        for i in range(300):
            store.keep(f"{i:032}", stored(f"{i}", salt=f"{i}" * 100))
        assert tracemalloc.get_traced_memory()[0] < store.num_bytes
    finally:
        tracemalloc.stop()


def test_what_is_answered_is_on_disk_or_gone_from_it(tmp_path: Path) -> None:
    """At once, since the next thing may be that the process is killed."""

    def is_there(text: str) -> bool:
        files = (path for path in tmp_path.rglob("index.sqlite*") if path.is_file())
        return any(text.encode() in path.read_bytes() for path in files)

    llm = LLM(kv_dir=tmp_path, kv_dir_size="30MB", kv_cache_memory_bytes="10MB")
    with llm, live(llm) as server:
        for stream in (False, True):
            text = f"zebra {stream}"
            body = {"input": text, "max_output_tokens": 2, "stream": stream}
            said = server.post("/v1/responses", body).text
            assert is_there(text)
            (name,) = {*re.findall("resp_[0-9a-f]{32}", said)}
            assert server.delete(f"/v1/responses/{name}").status_code == 200
            assert not is_there(text)
        server.post("/v1/responses", {"input": "zebra", "max_output_tokens": 2})
        assert is_there("zebra")
        server.post("/v1/completions", {"prompt": "a yak", "max_tokens": 2})
        assert llm.offload is not None and llm.offload.disk is not None
        llm.offload.disk.flush()
        assert server.post("/v1/cache/flush").json() == {"flushed": True}
        assert is_there("zebra"), "a response is stored until it is deleted"
        assert not is_there("yak")


def test_items_of_stored_responses_may_be_named_once(scripted: LiveServer):
    """As the AI SDK does in every second turn, and where there are thoughts beside calls."""
    api, asked = Responses(scripted.url, False), user("Think about the weather in Oslo")
    first = api.ask(asked, tools=[WEATHER], **ADA)
    path, salt = f"/v1/responses/{first.whole.id}/input_items", {"Cache-Salt": "Ada's"}
    (given,) = scripted.get(path, headers=salt).json()["data"]
    result, whole = api.result(first.calls[0], "7°"), [asked, *first.said]
    assert [item["type"] for item in first.said] == ["reasoning", "function_call"]
    for kind in ({"type": "item_reference"}, {}):
        names = [{**kind, "id": item["id"]} for item in (given, *first.said)]
        named, sent = (api.ask(*said, result, tools=[WEATHER], **ADA) for said in (names, whole))
        assert (named.text, named.prompt) == (sent.text, sent.prompt) and named.text == "It is 7°"
        wrong = {"id": names[1]["id"].replace("rs", "msg")}
        for said, other in ((names, {}), (names, BOB), ([wrong], ADA), ([wrong, wrong], ADA)):
            with pytest.raises(openai.NotFoundError, match=r"the item '.*' is not kept"):
                api.ask(*said, result, tools=[WEATHER], **other)
        with pytest.raises(openai.BadRequestError, match=r"the item '.*' is named twice"):
            api.ask(*names, names[0], result, tools=[WEATHER], **ADA)


def test_a_disk_that_fails_keeps_what_is_deleted_and_stores_nothing_without_a_word(tmp_path: Path):
    llm = LLM(kv_dir=tmp_path, kv_dir_size="30MB", kv_cache_memory_bytes="10MB")
    with llm, live(llm) as server:
        names = {}
        for fails, stream in ((0, False), (1, False), (1, True)):
            disk: Any = llm.offload and llm.offload.disk
            disk._on_thread(partial(disk._index.execute, f"pragma query_only = {fails}"))
            said = server.post("/v1/responses", {"input": "a gnu", "stream": stream}).text
            assert re.findall('"store": ?(true|false)', said)[-1] == ("false" if fails else "true")
            names[fails] = f"/v1/responses/{re.findall('resp_[0-9a-f]{32}', said)[-1]}"
            assert server.get(names[fails]).json()["store"] is (not fails)
        for _ in range(2):  # and again, rather than 404
            assert server.delete(names[0]).status_code == 503
            assert server.get(names[0]).status_code == 200
        disk._on_thread(partial(disk._index.execute, "pragma query_only = 0"))
        assert [server.delete(names[0]).status_code for _ in range(2)] == [200, 404]
