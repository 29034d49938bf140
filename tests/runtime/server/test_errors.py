"""Whatever is wrong with a request, the answer has OpenAI's error shape and says what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from radixcache import LLM, InvalidRequest
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
)
from radixcache.runtime.server.protocol.responses import ResponsesRequest
from tests.models import tiny_model
from tests.runtime.server.live import LiveServer, ask, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


CALL: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
]
RESULT: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "tool", "tool_call_id": "call_2", "content": "x"},
]


def assert_error(response: Any, status: int, sentence: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert sentence in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (CHAT, {}, "messages: Field required"),
        (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
        (CHAT, {"messages": "hello"}, "messages: Input should be a valid list"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0: only an assistant's message may"),
        (CHAT, {"messages": ask("?"), "temperature": "hot"}, "temperature: Input should be"),
        (CHAT, {"messages": ask("?"), "top_logprobs": 2}, "top_logprobs needs logprobs"),
        (CHAT, {"messages": ask("?"), "stream_options": {}}, "only for streams"),
        (CHAT, {"messages": ask("?"), "tools": [{}]}, "tools"),
        (CHAT, {"messages": ask("?"), "response_format": {"type": "xml"}}, "format.type"),
        (CHAT, {"messages": ask("?"), "prefix": "no/name"}, "prefix: String should match"),
        (CHAT, {"messages": ask("\ud800")}, "half of a surrogate pair"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages.0.content: Input should"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url: not supported: models here read and write text",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.id: ",
        ),
        (CHAT, {"messages": ask("?"), "functions": [{}]}, "functions: "),
        (CHAT, {"messages": [{"role": "usr", "content": "x"}]}, "no role is called 'usr': say sys"),
        (CHAT, {"messages": RESULT}, "message 1: a tool's result has the id of a call before it"),
        (CHAT, {"messages": CALL + RESULT}, "the id of a call before it, not 'call_2'"),
        (CHAT, {"messages": [*CALL, {**RESULT[1], "tool_call_id": None}]}, "before it, not None"),
        (
            CHAT,
            {"messages": ask("?"), "response_format": {"type": "json_schema"}},
            "response_format: the json_schema is missing",
        ),
        (CHAT, {"messages": ask("?"), "stop": [7]}, "stop.0: Input should be a valid string"),
        (COMPLETIONS, {"prompt": {}}, "prompt: Input should be a valid string or a valid list"),
        (COMPLETIONS, {"prompt": [[1.5]]}, "prompt.0.0: Input should be a valid integer"),
        (COMPLETIONS, {}, "prompt: Field required"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "the prompt is empty"),
        (COMPLETIONS, {"prompt": ["fine", ""]}, "prompt 1: the prompt is empty"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
        (COMPLETIONS, {"prompt": [99_999]}, "token ids outside the vocabulary"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "seed: Input should be less than"),
        (COMPLETIONS, {"prompt": "x", "top_k": 10**400}, "top_k"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs: Input should be less than"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix: not supported: write both sides"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of is not supported"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias: a bias is a number"),
        (
            COMPLETIONS,
            {"prompt": "x", "logit_bias": {"a": 1}},
            "logit_bias: its keys are token ids",
        ),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"9999": 1}}, "outside the vocabulary"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 99}, "at most max_tokens (64)"),
        (COMPLETIONS, {"prompt": "x", "bad_words": [" "]}, "bad_words must have tokens"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["x"] * 65}, "bad_words: at most 64 strings"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "are not streamed"),
        (COMPLETIONS, {"prompt": "x", "temprature": 1}, "did you mean temperature?"),
        (COMPLETIONS, {"prompt": "x", "colour": "red"}, "colour: there is no such field"),
        (
            COMPLETIONS,
            {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats: not supported: set include_usage",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "allowed_token_ids": [1], "min_tokens": 3},
            "no token is left to go on with",
        ),
        (COMPLETIONS, {"prompt": "x", "echo": True, "prefix": "p"}, "a prefix cannot be echoed"),
        ("/tokenize", {}, "either a prompt or messages"),
        ("/v1/explain", {}, "either a prompt or messages are explained"),
        ("/v1/explain", {"prompt": ""}, "the prompt is empty"),
        ("/v1/explain", {"prompt": "x", "echo": 1, "salt": 1}, "salt: there is no such field"),
        ("/v1/explain", {"prompt": "x", "suffix": "y"}, "suffix: not supported"),
        ("/v1/explain", {"messages": RESULT}, "message 1: a tool's result has the id"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0: Input should be greater than or equal to 0"),
        ("/v1/prefixes", {"name": "x"}, "either a prompt or messages"),
        ("/v1/prefixes", {"name": "x", "prompt": "y", "lifetime": 0}, "lifetime: Input should be"),
        ("/v1/prefixes", {"name": "x", "prompt": ""}, "the prompt is empty"),
    ],
)
def test_a_bad_body_is_told_what_is_bad(
    server: LiveServer, path: str, body: dict[str, Any], sentence: str
):
    response = server.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert_error(response, 400, sentence)
    server.assert_idle()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{oops", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[]", "Input should be a valid dictionary"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature: Input should be a finite number"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature: Input should be a finite number"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", ""),
    ],
    ids=["broken", "binary", "list", "nan", "infinite", "deep", "digits"],
)
def test_a_body_that_is_no_proper_json_is_refused(
    server: LiveServer, content: bytes, sentence: str
):
    headers = {"content-type": "application/json"}
    assert_error(server.post(COMPLETIONS, content=content, headers=headers), 400, sentence)


@pytest.mark.parametrize(
    ("path", "given", "sentence"),
    [
        ("messages", {"stop_sequences": ["a"] * 70}, "stop_sequences: at most 64 strings"),
        ("messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: String"),
        ("messages", {"temperature": -1}, "temperature: Input"),
        ("messages", {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: "),
        ("messages", {"output_config": {"effort": "high"}}, "how much to think"),
        ("messages", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens: Input"),
        ("responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name: String"),
        ("responses", {"text": {"format": {"type": "xml"}}}, "text.format.type: "),
        (
            "responses",
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "1"}]},
            "input.0: ",
        ),
    ],
)
def test_what_is_refused_is_named_as_the_client_sent_it(
    server: LiveServer, path: str, given: dict[str, Any], sentence: str
):
    asked = {"input": "x"} if path == "responses" else {"messages": ask("?"), "max_tokens": 1}
    response = server.post(f"/v1/{path}", {**asked, **given})
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


_DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize("flaw", ["1e999", "NaN", '"\\ud800"', '{"\\ud800": 1}', _DEEP])
@pytest.mark.parametrize(
    "body",
    [
        (
            "chat/completions",
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": FLAW}}]',
        ),
        ("chat/completions", '"chat_template_kwargs": FLAW'),
        ("chat/completions", '"structured_outputs": {"json": FLAW}'),
        ("responses", '"tools": [{"type": "function", "name": "f", "parameters": FLAW}]'),
        ("responses", '"text": {"format": {"type": "json_schema", "schema": FLAW}}'),
        ("responses", '"metadata": FLAW'),
        ("messages", '"tools": [{"name": "f", "input_schema": FLAW}]'),
        ("messages", '"output_config": {"format": {"type": "json_schema", "schema": FLAW}}'),
    ],
    ids=lambda body: f"{body[0]} {body[1][1:15]}",
)
def test_what_could_not_be_written_again_is_refused_wherever_anything_may_stand(
    server: LiveServer, body: tuple[str, str], flaw: str
):
    """As 500s, or in what is rendered, or in answers that no client could read."""
    path, field = body
    asked = (
        '"input": "x"' if path == "responses" else '"messages": [{"role": "user", "content": "x"}]'
    )
    content = f'{{"max_tokens": 1, {asked}, {field}}}'.replace("FLAW", f'{{"a": {flaw}}}')
    content = (
        content.replace('"max_tokens"', '"max_output_tokens"') if path == "responses" else content
    )
    headers = {"content-type": "application/json"}
    response = server.post(f"/v1/{path}", content=content, headers=headers)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert any(reason in message for reason in ("nested deeper", "surrogate", "no numbers"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * 10_001}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}] * 10_000}]}),
        ("chat/completions", {"messages": ask("?"), "tools": [{"type": "function"}] * 10_001}),
        ("responses", {"input": [{"role": "user", "content": "x"}] * 10_001}),
        ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}] * 10_001}),
    ],
    ids=["messages", "parts", "tools", "items", "turns"],
)  # fmt: skip
def test_more_items_than_anybody_has_are_refused(
    server: LiveServer, path: str, body: dict[str, Any]
):
    """2 MB of short messages stopped all clients for six seconds."""
    response = server.post(f"/v1/{path}", body)
    assert response.status_code == 400
    assert "at most 10000 items" in response.json()["error"]["message"]


def test_what_is_allowed_a_hundred_times_over_is_looked_at_once():
    """A body of 2 MB took 16 bytes a token and row in every step."""
    body = {"prompt": "x", "allowed_token_ids": [7, 8] * 500}
    assert CompletionRequest.model_validate(body).allowed_token_ids == [7, 8]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_arguments_nested_too_deep_are_refused(server: LiveServer, path: str):
    called = {"name": "f", "arguments": '{"a":' + "[" * 5000 + "]" * 5000 + "}"}
    body: dict[str, Any] = {"input": [{"type": "function_call", "call_id": "c", **called}]}
    if path != "responses":
        calls = [{"id": "c", "type": "function", "function": called}]
        body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    assert_error(server.post(f"/v1/{path}", body), 400, "a tool call has a 'function'")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": [[1.5] * 1000]}),
        (CompletionRequest, {"prompt": "x", "stop": [7] * 1000}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * 1000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "" for i in range(1000)}}),
        (CompletionRequest, {"prompt": "x", **{f"field{i}": 1 for i in range(1000)}}),
        (ChatRequest, {"messages": [7] * 1000}),
        (ResponsesRequest, {"input": "x", "metadata": {str(i): 1 for i in range(1000)}}),
        (ChatRequest, {"messages": [{"role": "user", "content": [7] * 1000}]}),
        (PrefixRequest, {"name": "x", "messages": [{}] * 1000}),
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
    ],
)
def test_what_is_wrong_a_thousand_times_is_complained_of_once(kind: Any, body: dict[str, Any]):
    """A body of 2 MB took 2.5 GB and stopped all clients for 20 seconds."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 5


def test_a_body_that_is_not_called_json_is_told_so(server: LiveServer):
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        response = server.post(
            COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}
        )
        assert_error(response, 400, "send 'Content-Type: application/json'")


def test_paths_and_methods_that_do_not_exist(server: LiveServer):
    assert assert_error(server.get("/v2/x"), 404, "nothing at '/v2/x'")["message"].endswith("x'")
    for path, near in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/responses", "/v1/responses"),
    ):
        assert_error(server.post(path, {}), 404, f"nothing at {path!r}: did you mean {near}?")
    for path, near in (
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/messages", "/v1/messages"),
    ):
        answer = server.post(path, {})
        assert answer.status_code == 404 and answer.json() == {
            "type": "error",
            "error": {
                "type": "not_found_error",
                "message": f"there is nothing at {path!r}: did you mean {near}?",
            },
        }
    assert_error(server.get(COMPLETIONS), 405, "the method must be POST")
    assert_error(server.get("/v1/prefixes/unknown"), 404, "no prefix named 'unknown'")
    assert_error(
        server.post(COMPLETIONS, {"prompt": "x", "model": "other"}), 404, "'other' is not served"
    )


def test_a_model_without_tokenizer_completes_token_ids_only(tmp_path_factory):
    path = tiny_model("llama", tmp_path_factory.mktemp("bare"), tokenizer=False)
    with live(LLM(path, kv_cache_memory_bytes="1MiB")) as server:
        completion = server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2}).json()
        assert completion["usage"]["completion_tokens"] in (1, 2)
        assert completion["choices"][0]["text"] == ""
        for path_, body in (
            (COMPLETIONS, {"prompt": "x"}),
            (COMPLETIONS, {"prompt": [1], "stop": "x"}),
            (COMPLETIONS, {"prompt": [1], "logprobs": 1}),
            (COMPLETIONS, {"prompt": [1], "echo": True}),
            (CHAT, {"messages": ask("?")}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            assert_error(server.post(path_, body), 400, "no tokenizer")
        assert server.get("/v1/cache").status_code == 200
        server.assert_idle()


def test_a_timeout_of_no_time_is_refused():
    for seconds in (0, -1, float("nan")):
        with pytest.raises(InvalidRequest, match="request_timeout must be above 0"):
            ServerArgs(request_timeout=seconds)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "call_2", "output": "x"}]},
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "call_2"}],
                    }
                ],
            },
        ),
    ],
)
def test_a_result_of_a_call_that_nobody_made_is_refused_by_each_api(
    server: LiveServer, path: str, body: dict[str, Any]
):
    response = server.post(path, body)
    assert response.status_code == 400
    sentence = "message 0: a tool's result has the id of a call before it, not 'call_2'"
    assert response.json()["error"]["message"] == sentence
    server.assert_idle()
