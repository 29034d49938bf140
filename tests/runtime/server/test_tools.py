"""Tools over HTTP: calls in both shapes, choices that are kept, and turns that stay cached."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.cover import seeds
from tests.runtime.server.live import LiveServer, live
from tests.scripted import call, scripted_llm, turns

CHAT = "/v1/chat/completions"
NUM_TURNS = 20
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
"""For answers that a guide forces on a model which would say something else: it may think first."""


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


STEP = tool("step", {"type": "object", "properties": {"n": {"type": "integer"}}})


def script(prompt: str) -> str:
    """Qwen's way, but for the spelling: no template writes calls as this model does."""
    said = turns(prompt)[:-1]
    text = said[-1][1]
    if any(text.startswith("Loop") for _, text in said):
        n = sum("<tool_response>" in text for _, text in said)
        spelt = f'<tool_call>{{"name":"step","arguments":{{"why":"é","n":{n}}}}}</tool_call>'
        return spelt if n < NUM_TURNS else "Done."
    if text == "Think":
        return "<think>\nHm.\n</think>\n\nSo."
    if text == "Cut":
        return '<tool_call>\n{"name": "step", "argum'
    if text == "Two":
        return "Both.\n" + call("step", n=1) + "\n" + call("step", n=2)
    return f"{len(said)} messages" if "<tools>" not in prompt else "no call"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with scripted_llm(script) as llm, live(llm) as server:
        yield server
        server.assert_idle()


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(server: LiveServer, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The answer; of a stream the same, put together from its deltas."""
    body = {"messages": messages, "temperature": 0, **more}
    if not more.get("stream"):
        answer = server.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        return answer.json()
    body["stream_options"] = {"include_usage": True}
    text = server.post(CHAT, body).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    end = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for gained in delta.get("tool_calls", []):
                if "id" in gained:
                    assert gained["index"] == len(message["tool_calls"])
                    assert gained["function"]["arguments"] == ""
                    message["tool_calls"].append({**gained, "function": {**gained["function"]}})
                    del message["tool_calls"][-1]["index"]
                else:
                    known = message["tool_calls"][gained["index"]]["function"]
                    known["arguments"] += gained["function"]["arguments"]
            end = choice["finish_reason"] or end
    message = {key: value or None for key, value in message.items()}
    choice = {"message": {"role": "assistant", **message}, "finish_reason": end}
    return {"choices": [choice], "usage": chunks[-1]["usage"]}


def called(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"]["tool_calls"] or []
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_beside_content(server: LiveServer, stream: bool):
    answer = ask(server, user("Two"), tools=[STEP], stream=stream)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Both."
    assert called(answer) == [("step", {"n": 1}), ("step", {"n": 2})]
    assert choice["finish_reason"] == "tool_calls"
    ids = [c["id"] for c in choice["message"]["tool_calls"]]
    assert len({*ids}) == 2
    assert all(i.startswith("call_") for i in ids)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_by_both_names(server: LiveServer, stream: bool):
    message = ask(server, user("Think"), stream=stream)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("So.", "Hm.")
    if not stream:
        assert message["reasoning_content"] == "Hm."
    hidden = ask(server, user("Think"), stream=stream, include_reasoning=False)
    assert hidden["choices"][0]["message"]["reasoning"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(server: LiveServer, stream: bool):
    answer = ask(server, user("Cut"), tools=[STEP], stream=stream)
    assert answer["choices"][0]["message"]["content"] == '<tool_call>\n{"name": "step", "argum'
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = ask(server, user("Two"), tools=[STEP], tool_choice="none", stream=stream)
    assert "<tool_call>" in answer["choices"][0]["message"]["content"]
    assert not called(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_prefills_in_each_turn_what_is_new(server: LiveServer, stream: bool):
    """Though the template spells its calls another way than the model did."""
    messages = user(f"Loop {stream}")
    tokenizer = server.backend.llm.tokenizer
    assert tokenizer is not None
    before = 0
    for n in range(NUM_TURNS):
        answer = ask(server, messages, tools=[STEP], stream=stream)
        assert called(answer) == [("step", {"why": "é", "n": n})]
        usage = answer["usage"]
        if before:  # all but the last token, which has no KV
            assert usage["prompt_tokens_details"]["cached_tokens"] == before - 1
        # The end of the turn is sampled, and its text comes again from the template.
        before = usage["prompt_tokens"] + usage["completion_tokens"]
        (reply,) = answer["choices"][0]["message"]["tool_calls"]
        messages = [
            *messages,
            {"role": "assistant", "content": None, "tool_calls": [reply]},
            {"role": "tool", "tool_call_id": reply["id"], "content": f"result {n}"},
        ]
    last = ask(server, messages, tools=[STEP], stream=stream)
    assert last["choices"][0]["message"]["content"] == "Done."


def test_a_call_that_comes_back_changed_is_the_clients(server: LiveServer):
    messages = user("Loop changed")
    answer = ask(server, messages, tools=[STEP])
    (reply,) = answer["choices"][0]["message"]["tool_calls"]
    reply["function"]["arguments"] = '{"why": "other", "n": 0}'
    messages += [
        {"role": "assistant", "tool_calls": [reply]},
        {"role": "tool", "tool_call_id": reply["id"], "content": [{"type": "text", "text": "ok"}]},
    ]
    prompt = server.backend.llm.turns.encode(messages).text
    assert '{"name": "step", "arguments": {"why": "other", "n": 0}}' in prompt
    assert "é" not in prompt
    assert called(ask(server, messages, tools=[STEP])) == [("step", {"why": "é", "n": 1})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["step", "other"])
def test_the_named_function_is_called(server: LiveServer, name: str, stream: bool):
    choice = {"type": "function", "function": {"name": name}}
    other = tool("other", {"type": "object", "properties": {}, "additionalProperties": False})
    answer = ask(
        server,
        user("Hello"),
        tools=[STEP, other],
        tool_choice=choice,
        stream=stream,
        max_tokens=400,
        **NO_THOUGHTS,
    )
    ((called_name, _),) = called(answer)
    assert called_name == name
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] is None


def test_only_allowed_tools_are_called_and_one_at_a_time(server: LiveServer):
    other = tool("other", {"type": "object", "properties": {}, "additionalProperties": False})
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    tools = [STEP, other]
    answer = ask(
        server, user("Two"), tools=tools, tool_choice=choice, max_tokens=400, **NO_THOUGHTS
    )
    assert {name for name, _ in called(answer)} == {"other"}
    answer = ask(server, user("Two"), tools=[STEP], parallel_tool_calls=False)
    assert called(answer) == [("step", {"n": 1})]


def test_strict_arguments_follow_their_schema(server: LiveServer):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 7, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    free = ask(server, user("Two"), tools=[tool("step", schema)])
    assert called(free)[0] == ("step", {"n": 1})
    strict = ask(server, user("Two"), tools=[tool("step", schema, strict=True)], max_tokens=400)
    assert strict["choices"][0]["message"]["content"].startswith("Both.")
    for _, arguments in called(strict):
        jsonschema_rs.validate(schema, arguments)


def test_beside_tools_an_answer_may_have_a_form(server: LiveServer):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [12]}}}
    answer = ask(
        server, user("Hello"), tools=[STEP], response_format=form, max_tokens=99, **NO_THOUGHTS
    )
    assert answer["choices"][0]["message"]["content"] == "12" or called(answer)


def test_a_message_goes_on(server: LiveServer):
    begun = [*user("Hello"), {"role": "assistant", "content": "2 mes"}]
    body: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = server.backend.llm.turns.encode(begun, ask=False, continue_final=True).text
    assert prompt.endswith("assistant\n2 mes")
    answer = ask(server, begun, **body)
    assert answer["usage"]["prompt_tokens"] < ask(server, begun)["usage"]["prompt_tokens"]


def test_the_template_takes_the_clients_values(server: LiveServer):
    free = ask(server, user("Hello"))["usage"]["prompt_tokens"]
    for more in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        assert ask(server, user("Hello"), **more)["usage"]["prompt_tokens"] > free
    assert ask(server, user("Hello"), reasoning_effort="low")["usage"]["prompt_tokens"] == free


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [STEP, STEP]}, "two tools have the same name"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [STEP], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": [tool("a b", {})]}, "tools.0.function.name: "),
        ({"functions": [{"name": "f"}]}, "functions: not supported: send them as tools"),
        ({"function_call": {"name": "f"}}, "function_call: not supported: send tools"),
        ({"chat_template_kwargs": {"unheard": 1}}, "takes no unheard"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        (
            {"tools": [tool("f", {"not": {}})], "tool_choice": "required"},
            "not",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "only an assistant"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "an object as JSON text",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    server: LiveServer, fields: dict[str, Any], message: str
):
    answer = server.post(CHAT, {"messages": user("Hello"), **fields})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    match rng.randrange(7 if depth < 2 else 5):
        case 0:
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case 1:
            return {"type": "integer", "minimum": 0, "maximum": rng.randint(0, 99)}
        case 2:
            return {"type": "boolean"}
        case 3:
            return {"enum": rng.sample(["a", "é", 'b"', 7, None, 2.5], rng.randint(1, 4))}
        case 4:
            return {"$ref": "#/$defs/shared"}
        case 5:
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2}
        case _:
            names = rng.sample(["a", "b b", "c", "<"], rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.7],
                "additionalProperties": False,
            }


def random_parameters(rng: random.Random) -> dict[str, Any]:
    parameters = random_schema(rng)
    while parameters.get("type") != "object":
        parameters = random_schema(rng)
    return {**parameters, "$defs": {"shared": {"enum": ["x", 1]}}}


@seeds(20, 49)
def test_required_calls_are_valid(server: LiveServer, seed: int):
    """Of random functions with random schemas, as a model that knows of none samples them."""
    rng = random.Random(seed)
    print("seed", seed)
    for _ in range(20):
        tools = {f"f{i}": random_parameters(rng) for i in range(rng.randint(1, 3))}
        answer = ask(
            server,
            user("Hello"),
            tools=[tool(name, parameters) for name, parameters in tools.items()],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.0,
            seed=rng.randrange(2**31),
            max_tokens=2000,
            **NO_THOUGHTS,
        )
        ((name, arguments),) = called(answer)
        jsonschema_rs.validate(tools[name], arguments)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
