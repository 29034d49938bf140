"""What is wrong with a request is told in one sentence, in the names that the client used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from radixcache import LLM
from radixcache.runtime.server.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
)
from radixcache.runtime.server.protocol.responses import ResponsesRequest
from tests.helpers.models import tiny_model
from tests.runtime.server.api.apis import user
from tests.runtime.server.live import LiveServer, assert_error, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = user("Hi")
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [HI], "max_tokens": 1},
}
"""What each body of the table is put into."""


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def called(arguments: Any) -> dict[str, Any]:
    made = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [made]}


def result(call_id: str | None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


MARKED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
NO_CALL = "message 1: a tool's result has the id of a call before it"
NO_MEDIA = "not supported: send text, or an image as this API writes it"
TOO_MANY = "at most 10000 items"
ITEM_CALL = {"type": "function_call", "call_id": "1", "name": "f"}
ITEM_RESULT = {"type": "function_call_output", "call_id": "d", "output": "x"}

FULL = "This model's maximum context length is 4096 tokens. However, the prompt is too long: "
"""By these words clients know that they must cut their conversation."""

HOSTED = {"type": "web_search", "external_web_access": True}
SEARCH = {"type": "web_search_20250305", "name": "s", "max_uses": 8}
CLEAR = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": "x"}}


def found(name: str) -> dict[str, Any]:
    content = [{"type": "tool_reference", "tool_name": name}]
    return {"type": "tool_result", "tool_use_id": "x", "content": content}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Messages and prompts.
    (CHAT, {"messages": [7]}, "messages.0: Input should be an object"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0: only an assistant's message may"),
    (CHAT, {"messages": [{"role": "usr", "content": "x"}]}, "no role is called 'usr': say sys"),
    (CHAT, {"messages": [user("\ud800")]}, "half of a surrogate pair"),
    (CHAT, {"messages": [user("x " * 9000)]}, FULL),
    (CHAT, {"messages": [HI] * 10_001}, TOO_MANY),
    (CHAT, {"messages": [user([{"type": "text"}] * 10_000)]}, TOO_MANY),
    (COMPLETIONS, {"prompt": {}}, "prompt: Input should be a valid string or a valid list"),
    (COMPLETIONS, {"prompt": ["fine", ""]}, "prompt 1: the prompt is empty"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": [99_999], "stream": True}, "token ids outside the vocabulary"),
    (RESPONSES, {"input": [HI] * 10_001}, TOO_MANY),
    (MESSAGES, {"messages": [user([{"type": "text"}])]}, "content.0: a text needs 'text'"),
    (MESSAGES, {"messages": [HI] * 10_001}, TOO_MANY),
    (MESSAGES, {"messages": [{"role": "user", "content": [MARKED] * 5}]}, "4 places at most"),
    (CHAT, {"messages": [user([{"type": "input_audio", "input_audio": {}}])]}, NO_MEDIA),
    (RESPONSES, {"input": [user([{"type": "input_file", "file_id": "file-1"}])]}, NO_MEDIA),
    # Sampling.
    (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
    (CHAT, {"stream_options": {}}, "only for streams"),
    (COMPLETIONS, {"stop": "x" * 4097}, "stop: at most 64 strings of 4096 characters together"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
    (COMPLETIONS, {"top_k": 10**400}, "top_k"),
    (COMPLETIONS, {"best_of": 3}, "best_of is not supported"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias: a bias is a number"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias: its keys are token ids"),
    (COMPLETIONS, {"logit_bias": {"9999": 1}}, "outside the vocabulary"),
    (COMPLETIONS, {"logit_bias": {f"{i}": 1 for i in range(10_001)}}, "at most 10000 tokens have"),
    (COMPLETIONS, {"bad_words": [" "]}, "bad_words must have tokens"),
    (COMPLETIONS, {"bad_words": ["x"] * 65}, "bad_words: at most 64 strings"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "are not streamed"),
    (COMPLETIONS, {"allowed_token_ids": [1], "min_tokens": 3}, "no token is left to go on with"),
    (COMPLETIONS, {"echo": True, "prefix": "p"}, "a prefix cannot be echoed"),
    (MESSAGES, {"stop_sequences": ["a"] * 70}, "stop_sequences: at most 64 strings"),
    # Tools and their results.
    (CHAT, {"tools": [tool("f"), tool("f")]}, "two tools have the same name"),
    (CHAT, {"tools": [tool("a b")]}, "tools.0.function.name: String should match"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
    (RESPONSES, {"tools": [{"type": "shell"}]}, "tools of type 'shell' are not supported"),
    (RESPONSES, {"tools": [{"type": "apply_patch"}]}, "are not supported: describe a function"),
    (RESPONSES, {"tools": [{"type": "custom"}]}, "tools.0: a custom needs 'name'"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    (RESPONSES, {"tools": [HOSTED], "tool_choice": "required"}, "tool_choice needs tools"),
    (RESPONSES, {"input": [{"type": "shell_call", "id": "x"}]}, "input.0.type"),
    (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0.type"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, "item_reference needs 'id'"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "type 'bash_20250124' are"),
    (MESSAGES, {"tools": [{"name": "f"}]}, "tools.0: a custom needs 'input_schema'"),
    (MESSAGES, {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "s"}}, "names 's'"),
    (MESSAGES, {"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    (MESSAGES, {"messages": [user([found("f")])]}, "a tool_reference names 'f', which is no tool"),
    (MESSAGES, {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits.0.type"),
    (MESSAGES, {"context_management": {"edits": [CLEAR]}}, "keeps the thoughts of a number of"),
    (CHAT, {"tools": [tool("f", parameters={"x": "x" * (1 << 20)})]}, "JSON schemas in all tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice needs tools"),
    (CHAT, {"messages": [called([])]}, "arguments: Input should be a valid string"),
    (CHAT, {"messages": [called("{}"), result(None)]}, f"{NO_CALL}, not None"),
    (RESPONSES, {"input": [HI, ITEM_RESULT]}, f"{NO_CALL}, not 'd'"),
    (RESPONSES, {"input": [ITEM_CALL]}, "input.0: a function_call needs 'arguments'"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
    # Templates.
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "takes no enable_thinking"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "messages"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "prompt to be false"),
    # The form of the answer.
    (CHAT, {"response_format": {"type": "json_schema"}}, "the json_schema is missing"),
    (CHAT, {"structured_outputs": {"json": {"not": {}}}}, "json does not compile: Unimpl"),
    (COMPLETIONS, {"structured_outputs": {}}, "none is given of json, regex, choice"),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supp"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "2 forms of the answer"),
    (COMPLETIONS, {"structured_outputs": {"json": False}}, "no JSON is of the schema false"),
    (COMPLETIONS, {"structured_outputs": {"json": {"description": "x" * (1 << 16)}}}, "65536 at"),
    # Fields that are not there, or go by another name.
    (COMPLETIONS, {"temprature": 1}, "temprature: there is no such field: did you mean temp"),
    (CHAT, {"prompt": "x"}, "prompt: not supported: send messages, or ask /v1/completions"),
    (CHAT, {"prefix": "no/name"}, "prefix: String should match"),
    (RESPONSES, {"response_format": {}}, "this API calls it text.format"),
    (RESPONSES, {"background": True}, "background: not supported: keep the connection open"),
    (RESPONSES, {"prompt_cache_options": {"prewarm": True}}, "POST /v1/prefixes"),
    (RESPONSES, {"prompt_cache_options": {"comparison_response_id": "resp_0"}}, "explain says why"),
    (MESSAGES, {"diagnostics": {"previous_message_id": "msg_0"}}, "explain says why"),
    (MESSAGES, {"stop": "x"}, "stop: not supported: this API calls it stop_sequences"),
    (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "cache_control.ttl"),
    # Other routes.
    (MESSAGES, {"messages": [user("x" * 90_000)]}, FULL),
    ("/tokenize", {}, "either a prompt or messages"),
    ("/detokenize", {"tokens": [1] * 100_001}, "at most 100000"),
    (COMPLETIONS, {"prompt": [5] * 5000}, FULL),
    (CHAT, {"messages": [user("x" * 500_000)], "stream": True}, FULL),
    (RESPONSES, {"input": "x " * 9000, "stream": True}, FULL),
    ("/v1/explain", {"prompt": [5] * 5000}, FULL),
    ("/v1/explain", {"prompt": "x", "echo": 1, "salt": 1}, "salt: there is no such field"),
]


@pytest.mark.parametrize(("path", "body", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_body_is_told_what_is_bad(
    server: LiveServer, path: str, body: dict[str, Any], sentence: str
):
    content = json.dumps({**PLAIN.get(path, {}), **body})
    response = server.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert sentence in error["message"] and "\n" not in error["message"]
    if path == MESSAGES:  # by which Claude Code knows
        assert error["message"].startswith("prompt is too long: ") == (sentence == FULL)
    else:
        assert (error["code"] == "context_length_exceeded") == (sentence == FULL)
    server.assert_idle()


_DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize("flaw", ["1e999", "NaN", '"\\ud800"', '{"\\ud800": 1}', _DEEP])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, '"tools": [{"type": "function", "function": {"name": "f", "parameters": FLAW}}]'),
        (CHAT, '"chat_template_kwargs": FLAW'),
        (CHAT, '"structured_outputs": {"json": FLAW}'),
        (RESPONSES, '"tools": [{"type": "function", "name": "f", "parameters": FLAW}]'),
        (RESPONSES, '"text": {"format": {"type": "json_schema", "schema": FLAW}}'),
        (RESPONSES, '"metadata": FLAW'),
        (MESSAGES, '"tools": [{"name": "f", "input_schema": FLAW}]'),
        (MESSAGES, '"output_config": {"format": {"type": "json_schema", "schema": FLAW}}'),
    ],
)
def test_what_could_not_be_written_again_is_refused_wherever_any_json_may_stand(
    server: LiveServer, path: str, field: str, flaw: str
):
    """Else it would be a 500, or in answers that no client could read."""
    content = f"{json.dumps(PLAIN[path])[:-1]}, {field}}}".replace("FLAW", f'{{"a": {flaw}}}')
    response = server.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    reasons = "nested deeper", "surrogate", "no numbers"
    assert any(reason in response.json()["error"]["message"] for reason in reasons)


@pytest.mark.parametrize(
    ("content", "kind", "sentence"),
    [
        (b"{oops", "json", "the body is not JSON"),
        (b"\xff\xfe", "json", "the body is not JSON"),
        (b"[]", "json", "Input should be an object"),
        (b'{"prompt": "x", "temperature": NaN}', "json", "temperature: Input should be a finite"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json", "too deep"),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", "json", "too long a number"),
        (b'{"prompt": "x"}', "x-www-form-urlencoded", "send 'Content-Type: application/json'"),
        # Which a page of another origin may send without asking first.
        (b'{"prompt": "x"}', "text/plain", "send 'Content-Type: application/json'"),
    ],
)
def test_a_body_that_is_no_proper_json_is_refused(
    server: LiveServer, content: bytes, kind: str, sentence: str
):
    headers = {"content-type": kind if "/" in kind else f"application/{kind}"}
    assert_error(server.post(COMPLETIONS, content=content, headers=headers), 400, sentence)


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
        (ChatRequest, {"messages": [{"role": "user", "content": [7] * 1000}]}),
        (ResponsesRequest, {"input": "x", "metadata": {str(i): 1 for i in range(1000)}}),
        (PrefixRequest, {"name": "x", "messages": [{}] * 1000}),
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
    ],
)
def test_what_is_wrong_a_thousand_times_is_complained_of_once(kind: Any, body: dict[str, Any]):
    """A body of 2 MB took 2.5 GB and stopped all clients for 20 seconds."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 5


@pytest.mark.parametrize(
    ("method", "path", "status", "sentence"),
    [
        ("GET", "/v2/x", 404, "there is nothing at '/v2/x'"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/messages", 404, "did you mean /v1/messages?"),
        ("POST", "/reset_prefix_cache", 404, "did you mean /v1/cache/flush?"),
        ("GET", COMPLETIONS, 405, "the method must be POST"),
        ("GET", "/v1/models/other/model", 404, "'other/model' is not served here"),
        ("GET", "/v1/cache?row=3", 400, "there is no query parameter 'row' here"),
        ("GET", "/v1/models?limit=0", 400, "limit"),
        ("GET", "/v1/models?page=1", 400, "page"),
        ("GET", "/v1/responses/resp_0/input_items", 404, "no response 'resp_0' is kept"),
        ("POST", "/v1/cache/flush?replica=a", 400, "replica"),
        ("GET", "/v1/cache/search?text=", 400, "text: String should"),
    ],
)
def test_paths_methods_and_parameters_that_do_not_exist(
    server: LiveServer, method: str, path: str, status: int, sentence: str
):
    response = server.get(path) if method == "GET" else server.post(path, {})
    assert response.status_code == status and sentence in response.json()["error"]["message"]
    assert (response.json().get("type") == "error") == path.endswith("/messages")


def test_a_long_name_is_not_told_back(server: LiveServer):
    response = server.post(COMPLETIONS, {"model": "x" * 1_000_000, "prompt": "a"})
    assert response.status_code == 404 and len(response.text) < 1300


def test_a_model_without_tokenizer_completes_token_ids_only(tmp_path_factory):
    path = tiny_model("llama", tmp_path_factory.mktemp("bare"), tokenizer=False)
    with live(LLM(path, kv_cache_memory_bytes="1MiB")) as server:
        completion = server.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2}).json()
        assert completion["choices"][0]["text"] == ""
        for more in ({"prompt": "x"}, {"stop": "x"}, {"logprobs": 1}, {"echo": True}):
            assert_error(server.post(COMPLETIONS, {"prompt": [1], **more}), 400, "no tokenizer")
        for route, body in ((CHAT, PLAIN[CHAT]), ("/detokenize", {"tokens": [1]})):
            assert_error(server.post(route, body), 400, "no tokenizer")
        assert server.get("/v1/cache").status_code == 200
        server.assert_idle()


def test_tokens_allowed_a_hundred_times_over_are_looked_at_once():
    body = {"prompt": "x", "allowed_token_ids": [7, 8] * 500}
    assert CompletionRequest.model_validate(body).allowed_token_ids == [7, 8]
