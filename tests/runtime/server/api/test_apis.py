"""What holds for chat completions, responses and messages alike, whole and streamed."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from radixcache import LLM, SamplingParams
from radixcache.runtime.server.api import exchange
from radixcache.runtime.server.http import access
from radixcache.runtime.server.protocol.anthropic import MessagesRequest
from radixcache.runtime.server.protocol.openai import ChatRequest
from radixcache.runtime.server.protocol.responses import ResponsesRequest
from radixcache.runtime.server.protocol.turn import TurnRequest
from radixcache.runtime.tokens.tool_calls import Tool
from tests.runtime.server import http
from tests.runtime.server.api.apis import (
    NUM_TURNS,
    SCHEMA,
    WEATHER,
    Api,
    Called,
    Chat,
    Messages,
    Responses,
    user,
)
from tests.runtime.server.live import LiveServer, live

APIS = [(kind, stream) for kind in (Chat, Responses, Messages) for stream in (False, True)]
STEP = {"name": "step", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}


@pytest.fixture(params=APIS, ids=lambda case: f"{case[0].__name__}-{'stream' * case[1] or 'whole'}")
def api(request: pytest.FixtureRequest, scripted: LiveServer) -> Iterator[Api]:
    kind, stream = request.param
    yield kind(scripted.url, stream)
    scripted.assert_idle()


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """A text that no other test sends, so that nothing behind it is cached."""
    return str(request.node.name)


def values(calls: list[Called]) -> list[Any]:
    return [(made.name, made.arguments) for made in calls]


def test_the_next_turn_computes_only_what_is_new(api: Api, fresh: str):
    question = user(fresh)
    first = api.ask(question)
    assert (first.text, first.end, first.calls) == (f"user: {fresh}", "stop", [])
    second = api.ask(question, *first.said, user("And?"))
    assert second.text == "user: And?"
    # All of a turn is cached but its last token, which has no KV.
    assert second.cached == first.prompt + first.completion - 1 < second.prompt


def test_what_an_ended_conversation_used_alone_is_evicted_first(
    api: Api, fresh: str, scripted: LiveServer
) -> None:
    scripted.forget()
    texts = [f"{name} {fresh * 3}" for name in ("before", "over", "after")]
    answers = [api.ask(user(t), ends_conversation=t.startswith("over")) for t in texts]
    llm, cache = scripted.backend.llm, scripted.engine.cache
    cached = [llm.explain([user(text)]).num_cached_tokens for text in texts]
    tail = answers[1].completion + 60  # the answer goes first
    scripted.call(lambda: cache.evict(tail // cache.page_size))
    left = [llm.explain([user(text)]).num_cached_tokens for text in texts]
    assert left[1] < cached[1] and [left[0], left[2]] == [cached[0], cached[2]]


def test_tools_are_called_and_their_results_are_read(api: Api, fresh: str):
    question = user(f"Oslo and Rome? {fresh}")
    first = api.ask(question, tools=[WEATHER])
    assert (first.text.strip(), first.end) == ("Let me see.", "tools")
    assert values(first.calls) == [("weather", {"city": city}) for city in ("Oslo", "Rome")]
    assert len({made.id for made in first.calls}) == 2
    results = [api.result(made, f"{n}°") for n, made in enumerate(first.calls, 7)]
    second = api.ask(question, *first.said, *results, tools=[WEATHER])
    assert (second.text, second.end) == ("It is 7° and 8°", "stop")
    assert second.cached == first.prompt + first.completion - 1


def test_an_agent_prefills_in_each_turn_what_is_new(api: Api, fresh: str):
    """Though the template spells its calls another way than the model did."""
    conversation, before = [user(f"Loop {fresh}")], 0
    for n in range(NUM_TURNS):
        answer = api.ask(*conversation, tools=[STEP])
        assert values(answer.calls) == [("step", {"why": "é", "n": n})]
        assert not before or answer.cached == before - 1
        before = answer.prompt + answer.completion
        conversation += [*answer.said, api.result(answer.calls[0], f"result {n}")]
    assert api.ask(*conversation, tools=[STEP]).text == "Done."


def test_thoughts_are_apart_and_may_be_sent_back(api: Api, fresh: str):
    question = user(f"Think. {fresh}")
    first = api.ask(question)
    assert (first.reasoning.strip(), first.text.strip()) == ("Hm.", "Done.")
    kind = "completion" if isinstance(api, Chat) else "output"
    details = first.whole.usage.to_dict()[f"{kind}_tokens_details"]
    (thoughts,) = details.values()  # called reasoning_tokens, or thinking_tokens
    assert 0 < thoughts < first.completion
    assert api.ask(question, *first.said, user("A")).text == "user: A"


@pytest.mark.parametrize(("stop", "text"), [("Hm", "Done."), ("\n", "Done."), ("ne", "Do")])
def test_stop_strings_count_from_the_answer_on(api: Api, stop: str, text: str):
    name = "stop_sequences" if isinstance(api, Messages) else "stop"
    answer = api.ask(user("Think"), **{name: [stop]})
    assert (answer.reasoning.strip(), answer.text.strip()) == ("Hm.", text)
    answer = api.ask(user("Hm and so on"), **{name: stop if name == "stop" else [stop]})
    assert answer.text == "user: Hm and so on".partition(stop)[0]


def test_stop_strings_of_completions_and_of_the_runtime_do_not_count_in_thoughts(
    scripted: LiveServer,
):
    prompt = "<|im_start|>user\nThink<|im_end|>\n<|im_start|>assistant\n"
    body = {"prompt": prompt, "stop": ["Hm", "ne"], "max_tokens": 40}
    (choice,) = scripted.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == "<think>\nHm.\n</think>\n\nDo" and choice["stop_reason"] == "ne"
    (output,) = scripted.backend.llm.chat([user("Think")], SamplingParams(stop="Hm"))
    assert output.outputs[0].text.endswith("Done.")
    begun = {"prompt": f"{prompt}<think>\n", "stop": ["Hm"], "max_tokens": 40}
    assert scripted.post("/v1/completions", begun).json()["choices"][0]["text"].endswith("Done.")


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_that_must_come_does(api: Api, choice: str):
    answer = api.ask(user("Hi"), tools=[WEATHER], choice=choice)
    ((name, arguments),) = values(answer.calls)
    assert name == "weather" and {*arguments} == {"city"}
    # OpenAI's chat API calls it no news if the client has named the function.
    assert answer.end == ("stop" if isinstance(api, Chat) and choice == "weather" else "tools")
    if isinstance(api, Chat) and not api.stream:
        assert answer.whole.choices[0].message.content is None


@pytest.mark.parametrize("parameters", [{}, SCHEMA])
@pytest.mark.parametrize("more", [{}, {"description": "d", "strict": True}])
@pytest.mark.parametrize(
    ("kind", "of"),
    [(ChatRequest, Chat), (ResponsesRequest, Responses), (MessagesRequest, Messages)],
)
def test_a_tool_is_the_same_to_the_model_whoever_offers_it(
    kind: type[TurnRequest], of: type[Api], parameters: dict[str, Any], more: dict[str, Any]
):
    tools = [{"name": "f", "parameters": parameters, **more}]
    wanted = Tool("f", parameters or {"type": "object", "properties": {}}, **more)
    assert kind(**of("", False).body(user("Hi"), tools=tools)).offered == (wanted,)


def test_calls_come_one_by_one_or_not_at_all(api: Api):
    question = user("Oslo and Rome?")
    one = api.ask(question, tools=[WEATHER], parallel=False)
    assert values(one.calls) == [("weather", {"city": "Oslo"})]
    none = api.ask(question, tools=[WEATHER], choice="none")
    assert "<tool_call>" in none.text and none.end == "stop" and not none.calls


def test_calls_that_are_nearly_right_are_calls_whole_and_streamed(api: Api):
    answer = api.ask(user("Nearly"), tools=[STEP])
    assert values(answer.calls) == [("step", {"why": "a\n\tb"})] * 2
    assert (answer.text, answer.end) == ("", "tools")
    results = [api.result(made, "Good") for made in answer.calls]
    going_on = api.ask(user("Nearly"), *answer.said, *results, tools=[STEP])
    assert going_on.cached >= answer.prompt + answer.completion - 1


def test_a_call_that_is_cut_is_content(api: Api):
    answer = api.ask(user("Cut"), tools=[STEP])
    assert answer.text == '<tool_call>\n{"name": "step", "argum' and answer.end == "stop"


@pytest.mark.parametrize(
    ("said", "cities"),
    [("AAAAA", "A"), ("ABB", "AB"), ("ABAAB", "ABA"), ("ABC", "ABC"), ("AABB", "AABB")],
)
def test_where_calls_must_come_one_that_repeats_the_one_before_is_the_end(
    api: Api, said: str, cities: str
):
    """Small models repeat it until their answer is cut off."""
    choice = None if said == cities else "required"  # nothing is dropped where calls may come
    answer = api.ask(user(f"Again {said}"), tools=[WEATHER], choice=choice)
    assert "".join(made.arguments["city"] for made in answer.calls) == cities
    assert (answer.text, answer.end) == ("", "tools")
    each = api.ask(user("Again A"), tools=[WEATHER]).completion
    assert answer.completion <= each * (len(cities) + 1)


UNSAYABLE: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "https://example.com/schema"}, "example.com"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
]


def of_one(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool whose argument `a` is of a schema."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"name": name, "parameters": parameters, **more}


@pytest.mark.parametrize(("schema", "keyword"), UNSAYABLE)
def test_one_tool_does_not_fail_the_request(api: Api, schema: dict[str, Any], keyword: str):
    """What no grammar can say of its arguments is left to the model, if it is not strict."""
    number = {"type": "integer", "minimum": 7, "maximum": 9}
    tools = [of_one("good", number), of_one("bad", schema), of_one("none", {})]
    asked = user("Hi. <think></think>")
    called = api.ask(asked, tools=tools, choice="good", max_tokens=200).calls
    called += api.ask(asked, tools=tools, choice="required", max_tokens=200).calls
    assert called and all(7 <= made.arguments["a"] <= 9 for made in called if made.name == "good")
    strict = [*tools[:1], of_one("bad", schema, strict=True)]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=keyword) as no:
        api.ask(asked, tools=strict, choice="required")
    assert re.search(r"the strict tool .{0,2}'bad", str(no.value))


def test_an_answer_follows_a_schema(api: Api):
    answer = api.ask(user("Hi"), schema=SCHEMA)
    assert {*json.loads(answer.text)} == {"city"}


def test_what_an_answer_may_break_of_its_schema_is_named(scripted: LiveServer):
    words = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    tool, named = of_one("f", words), "uniqueItems"
    for kind, stream in product((Chat, Responses, Messages), (False, True)):
        for asked, left in (
            ({"schema": tool["parameters"]}, named),
            ({"tools": [{**tool, "strict": True}]}, named),
            ({"tools": [tool], "choice": "required"}, None),
        ):
            body = kind(scripted.url, stream).body(user("Hi"), max_tokens=5, **asked)
            answer = scripted.post(kind.path, {**body, "stream": stream})
            assert answer.headers.get("X-Schema-Left-Out") == left
    body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"json": tool["parameters"]}}
    assert scripted.post("/v1/completions", body).headers["X-Schema-Left-Out"] == named


CALL: dict[str, Any] = {"tools": [WEATHER], "choice": "required"}


@pytest.mark.parametrize("asked", [{"max_tokens": 3}, {"max_tokens": 32, **CALL}])
def test_an_answer_that_is_cut_says_so(api: Api, scripted: LiveServer, asked: dict[str, Any]):
    """Also within a call."""
    # Chat's stream helper of the stock client raises where an answer is cut and may be parsed.
    body = {**api.body(user("Hi"), **asked), "stream": api.stream}
    reason = {Chat: "length", Responses: "max_output_tokens", Messages: "max_tokens"}[type(api)]
    told = rf'"(finish_reason|reason|stop_reason)":\s?"{reason}"'
    text = scripted.post(api.path, body).text
    assert re.search(told, text)
    # The whole response, and its last item; in a stream, that has ended before.
    assert text.count('"status":"incomplete"') == (2 + api.stream) * isinstance(api, Responses)


def test_a_prompt_is_warmed_without_an_answer(api: Api, fresh: str):
    """`max_tokens: 0`, as Anthropic documents it."""
    body = {**api.body(user(fresh), max_tokens=0), "stream": api.stream}
    assert api_text(http.post(f"{api.url}{api.path}", json=body)) == ""
    warmed = api.ask(user(fresh))
    assert warmed.text == f"user: {fresh}" and warmed.cached == warmed.prompt


def api_text(response: httpx.Response) -> str:
    """What an answer says, whole or streamed."""
    assert response.status_code == 200, response.text
    said = re.findall(r'"(?:text|content|delta)":\s?"(.*?)"', response.text)
    return "".join(said)


@pytest.mark.parametrize("roles", ["sus", "uu", "usu", "ssuasu", "uus"])
def test_messages_in_any_order_are_taken(api: Api, fresh: str, roles: str):
    """Whether the template joins them is for `test_turn_order`; nobody is refused."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    said = [{"role": names[role], "content": f"{fresh} {n}"} for n, role in enumerate(roles)]
    last = user("Last")
    first = api.ask(*said, last)
    assert first.text == "user: Last"
    more = [{"role": "system", "content": "News"}, user("And?")]
    second = api.ask(*said, last, *first.said, *more)
    assert second.text == "user: And?"
    assert second.cached == first.prompt + first.completion - 1


DEEP = '{"a":' + "[" * 5000 + "]" * 5000 + "}"


@pytest.mark.parametrize("written", ['{"city": "Os', "", "[]", DEEP])
def test_a_call_comes_back_as_it_was_cut(api: Api, written: str):
    """Else the conversation could never go on: clients send what they got."""
    function = {"name": "weather", "arguments": written}
    made: dict[type[Api], Any] = {
        Chat: {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
        Responses: {"type": "function_call", "call_id": "c", **function},
        Messages: {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"INVALID_JSON": "x"}}
            ],
        },
    }
    result = api.result(Called("c", "weather", {}), "No JSON")
    answer = api.ask(user("Oslo"), made[type(api)], result, tools=[WEATHER])
    assert answer.text == "It is No JSON"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_come_back_with_all_that_clients_add(scripted: LiveServer, stream: bool):
    """LiteLLM's, LangChain's, OpenRouter's and OpenAI's own fields ask for nothing."""
    added: dict[type[Api], dict[str, Any]] = {
        Chat: {
            "id": "m", "parsed": {}, "annotations": [], "refusal": "", "audio": None,
            "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
            "thinking_blocks": [{"type": "thinking", "thinking": "x", "signature": ""}],
            "provider_specific_fields": {}, "cache_control": {"type": "ephemeral"},
        },
        Responses: {"id": "m", "phase": "final_answer", "status": "completed", "created_by": "x"},
        Messages: {},
    }  # fmt: skip
    for kind, more in added.items():
        api = kind(scripted.url, stream)
        first = api.ask(user("History"))
        said = [{**message, **more} for message in first.said]
        second = api.ask(user("History"), *said, user("And?"))
        assert second.text == "user: And?"
        assert second.cached >= first.prompt + first.completion - 1
    parts = [{"type": "refusal", "refusal": "No."}]
    for kind in (Chat, Responses):
        refused = [user("x"), {"role": "assistant", "content": parts}, user("And?")]
        plain = [user("x"), {"role": "assistant", "content": "No."}, user("And?")]
        api = kind(scripted.url, stream)
        assert api.ask(*refused).prompt == api.ask(*plain).cached
    own = [user("x"), {"role": "assistant", "content": None, "refusal": "No."}, user("And?")]
    assert Chat(scripted.url, stream).ask(*own).cached == api.ask(*plain).prompt
    kept = {"cache_control": {"type": "ephemeral"}}
    body = Chat("", stream).body(user("Hi"), tools=[WEATHER])
    body["tools"] = [{**tool, **kept} for tool in body["tools"]]
    assert scripted.post(Chat.path, body).status_code == 200
    for field in ("audio", "function_call", "tool"):  # what would change the answer
        body = Chat("", stream).body({"role": "assistant", "content": "x", field: {"id": "y"}})
        assert scripted.post(Chat.path, body).status_code == 400


def test_salts_share_nothing(api: Api, fresh: str):
    salts = [f"{name} {fresh}" for name in "aba"]
    cached = [api.ask(user(fresh), cache_salt=salt).cached for salt in salts]
    assert cached[:2] == [0, 0] and cached[2] > 0


def test_a_failing_engine_is_told_in_the_apis_own_form(api: Api, scripted: LiveServer):
    def fail() -> Any:
        raise RuntimeError("the model is broken: secret")

    body = {**api.body(user("Hi")), "stream": api.stream}
    scripted.call(lambda: setattr(scripted.engine, "step", fail))
    try:
        response = scripted.post(api.path, body)
    finally:
        scripted.call(lambda: delattr(scripted.engine, "step"))
    assert "the engine failed: RuntimeError" in response.text and "secret" not in response.text
    assert response.status_code == (200 if api.stream else 500)
    assert not api.stream or api.failed in response.text.strip().splitlines()[-1]


def test_a_request_whose_client_leaves_is_aborted(api: Api, scripted: LiveServer, monkeypatch: Any):
    """Also later than a body may take to come."""
    step = scripted.engine.step

    def slow() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(access, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(scripted.engine, "step", slow)
    monkeypatch.setattr(scripted.engine.scheduler, "proposer", None)  # slower still

    def aborted() -> float:
        _, _, rest = scripted.get("/metrics").text.partition('finished_total{reason="abort"} ')
        return float(rest.split()[0])

    before = aborted()
    body = {**api.body(user("Long")), "stream": api.stream}
    url = f"{scripted.url}{api.path}"
    if api.stream:
        with http.stream("POST", url, json=body, timeout=60) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post(url, json=body, timeout=0.3)
    scripted.wait_until(lambda: not scripted.engine.has_work, 2)
    assert aborted() == before + 1


SIGNS = {
    Chat.path: [": still at work"] * 3,
    "/v1/completions": [": still at work"] * 3,
    Messages.path: ["event: ping"] * 3,
    Responses.path: ["event: response.created"] + ["event: response.in_progress"] * 3,
}


@pytest.mark.parametrize("path", SIGNS)
def test_a_silent_stream_gives_heartbeats(scripted: LiveServer, path: str, monkeypatch: Any):
    """Before the first token; the engine does nothing until they have come."""
    step, held = scripted.engine.step, threading.Event()
    kinds = {kind.path: kind for kind in (Chat, Messages, Responses)}
    hello = {"prompt": "Hi"} if path not in kinds else kinds[path]("", True).body(user("Hi"))

    def wait() -> Any:
        assert held.wait(30)
        return step()

    monkeypatch.setattr(exchange, "SILENCE", 0.02)
    monkeypatch.setattr(scripted.engine, "step", wait)
    signs: list[str] = []
    body = {**hello, "stream": True}
    with http.stream("POST", f"{scripted.url}{path}", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith(("event: ", ":")):
                signs.append(line)
            if len(signs) >= len(SIGNS[path]):
                held.set()
    assert held.is_set() and signs[: len(SIGNS[path])] == SIGNS[path]
    monkeypatch.undo()
    for kind in kinds.values():  # stock clients read on over them
        monkeypatch.setattr(exchange, "SILENCE", 0.0)
        assert kind(scripted.url, True).ask(user("Hi")).text == "user: Hi"
    scripted.assert_idle()


def test_errors_have_the_shape_and_the_words_of_the_api():
    with live(
        LLM(kv_cache_memory_bytes="8MiB"), api_key="the key", max_body_size=1000,
        request_timeout=0.001,
    ) as server:  # fmt: skip
        bodies: dict[str, dict[str, Any]] = {
            Chat.path: {"messages": [user("Hi")]},
            Responses.path: {"input": "Hi"},
            Messages.path: {"messages": [user("Hi")], "max_tokens": 50},
            "/v1/completions": {"prompt": "Hi"},
        }
        key = {"authorization": "Bearer the key"}
        cases: list[tuple[dict[str, Any], dict[str, str], int, str, str]] = [
            ({}, {}, 401, "invalid_request_error", "authentication_error"),
            ({}, {"x-api-key": "no"}, 401, "invalid_request_error", "authentication_error"),
            ({"model": "claude"}, key, 404, "invalid_request_error", "not_found_error"),
            ({"user": "x" * 1000}, key, 413, "invalid_request_error", "request_too_large"),
            ({"temperature": -1}, key, 400, "invalid_request_error", "invalid_request_error"),
            ({}, key, 504, "timeout_error", "timeout_error"),
            ({}, {"x-api-key": "the key"}, 504, "timeout_error", "timeout_error"),
        ]
        for path, body in bodies.items():
            for more, headers, status, openai_kind, anthropic_kind in cases:
                response = server.post(path, {**body, **more}, headers=headers)
                told = response.json()
                assert response.status_code == status, (path, told)
                if path == Messages.path:
                    assert told.keys() == {"type", "error"} and told["type"] == "error"
                    assert told["error"].keys() == {"type", "message"}
                    assert told["error"]["type"] == anthropic_kind
                else:
                    assert told.keys() == {"error"} and told["error"]["type"] == openai_kind
                    assert told["error"].keys() == {"message", "type", "param", "code"}
