"""Whatever is wrong with a request, the answer has OpenAI's error shape and says what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixcache import LLM
from tests.models import tiny_model
from tests.server.live import LiveServer, ask, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


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
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (CHAT, {"messages": ask("?"), "temperature": "hot"}, "temperature: Input should be"),
        (CHAT, {"messages": ask("?"), "top_logprobs": 2}, "top_logprobs needs logprobs"),
        (CHAT, {"messages": ask("?"), "stream_options": {}}, "only for streams"),
        (CHAT, {"messages": ask("?"), "tools": [{}]}, "tools"),
        (CHAT, {"messages": ask("?"), "response_format": {"type": "json_object"}}, "format.type"),
        (CHAT, {"messages": ask("?"), "prefix": "no/name"}, "prefix: String should match"),
        (CHAT, {"messages": ask("\ud800")}, "half of a surrogate pair"),
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
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix: Input should be ''"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of is not supported"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 100}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "prefix": "p"}, "a prefix cannot be echoed"),
        ("/tokenize", {}, "either a prompt or messages"),
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


def test_paths_and_methods_that_do_not_exist(server: LiveServer):
    assert_error(server.get("/v1/nothing"), 404, "nothing at this path")
    assert_error(server.get(COMPLETIONS), 405, "Method Not Allowed")
    assert_error(server.get("/v1/prefixes/unknown"), 404, "no prefix named 'unknown'")
    assert_error(
        server.post(COMPLETIONS, {"prompt": "x", "model": "other"}), 404, "'other' is not served"
    )


def test_unknown_fields_are_ignored(server: LiveServer):
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "min_tokens": 3, "presence_penalty": 0}
    assert server.post(COMPLETIONS, body).status_code == 200


def test_a_model_without_tokenizer_completes_token_ids_only(tmp_path_factory):
    path = tiny_model("llama", tmp_path_factory.mktemp("bare"), tokenizer=False)
    with live(LLM(path, kv_memory="1MiB")) as server:
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
