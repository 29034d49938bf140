"""Why prompt tokens were not cached: beside an answer, by /v1/explain, by `radixcache explain`."""

from __future__ import annotations

import io
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from radixcache import LLM
from radixcache.runtime.cli import main
from tests.runtime.server.api.apis import user
from tests.runtime.server.http import stranger
from tests.runtime.server.live import SYSTEM, LiveServer, ask, live

EXPLAIN, CHAT, COMPLETIONS = "/v1/explain", "/v1/chat/completions", "/v1/completions"
QUESTION = "Question: how old is {} in this table of all members? Your answer:"
SALTED = {"cache_salt": "test_explain"}
SHARED = "and here is what all of them have in common at their ends."


@pytest.fixture
def llm() -> LLM:  # one for each test: what is explained depends on all before
    return LLM(kv_cache_memory_bytes="32MiB")


def misses(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["radixcache"]["explanation"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_explained_as_the_request_is_when_it_comes(llm: LLM, stream: bool):
    def at(time: str) -> dict[str, Any]:
        system = {"role": "system", "content": f"It is {time} o'clock.\n{SYSTEM['content']}"}
        return {"messages": [system, user("How old is Nora Lund?")], **SALTED}

    def state() -> object:
        generated = llm.engine.output_processor.num_generated
        return repr(llm.cache.stats), dict(llm.explainer.missed_tokens), generated

    with live(llm) as server:
        server.post(CHAT, at("10:38"))
        seen = server.call(state)
        told = server.post(EXPLAIN, {**at("10:41"), "temperature": 0}).json()
        assert server.call(state) == seen, "nothing is computed, counted or changed"
        (miss,) = told["explanation"]
        assert miss["reason"] == "diverged" and 0 < miss["start"] < 20
        assert "10:41" in miss["text"] and "10:38" in miss["text"]
        more = {"stream_options": {"include_usage": True}} if stream else {}
        answer = server.post(CHAT, {**at("10:41"), "explain": True, "stream": stream, **more}).text
        last = json.loads(answer.split("data: ")[-2] if stream else answer)
        assert misses(last) == [miss] and last["usage"]["prompt_tokens"] == told["prompt_tokens"]
        details = last["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == told["cached_tokens"] == miss["start"]
        answer = server.post(CHAT, {**at("10:43"), "explain": True, "stream": True}).text
        assert '"reason":"diverged"' in answer, "without usage, too"
        asked = {"prompt": ["a b c", "a b d"], "max_tokens": 1}
        answers = server.post(COMPLETIONS, asked).json()
        assert answers["radixcache"]["explanation"] is None and answers["radixcache"]["ttft"] > 0


def test_responses_and_messages_say_it_too(llm: LLM):
    text = SYSTEM["content"]
    with live(llm) as server:
        for path, system, body in (
            ("/v1/responses", "instructions", {"input": "Hi", "max_output_tokens": 1}),
            ("/v1/messages", "system", {"messages": [user("Hi")], "max_tokens": 1}),
        ):
            server.post(path, {**body, **SALTED, system: f"{path} at 10:38\n{text}"})
            more = {**SALTED, "explain": True, system: f"{path} at 10:41\n{text}"}
            (miss,) = misses(server.post(path, {**body, **more}).json())
            assert miss["reason"] == "diverged" and "10:41" in miss["text"]


def test_a_stream_says_how_far_its_prompts_are_computed_if_asked():
    """After each step, until the first token comes."""
    with live(LLM(kv_cache_memory_bytes="32MiB", max_num_batched_tokens=64)) as server:
        text = "x y " * 450

        def stream(**options: bool) -> tuple[list[Any], list[Any]]:
            """The chunks that say how far it is, and those behind them."""
            more = {"stream": True, "stream_options": {"include_usage": True, **options}}
            body = {"prompt": [text, f"{text}z"], "max_tokens": 2, **more}
            lines = server.post(COMPLETIONS, body).text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            count = sum("computed_tokens" in str(chunk) for chunk in chunks)
            return chunks[:count], chunks[count:]

        told, rest = stream(include_progress=True)
        prompt = rest[-1]["usage"]["prompt_tokens"]
        assert {one["radixcache"]["prompt_tokens"] for one in told} == {prompt}
        computed = [one["radixcache"]["computed_tokens"] for one in told]
        assert computed == sorted({*computed})
        first = prompt // 2  # whose token comes first
        assert 0 < computed[0] < prompt and 0 <= first - computed[-1] <= 64
        assert not any(chunk["choices"] or chunk["usage"] for chunk in told)
        assert all(chunk["choices"] for chunk in rest[:-1])
        server.post("/v1/cache/flush")
        assert stream()[0] == []
        server.assert_idle()


def test_texts_of_others_can_be_hidden(llm: LLM):
    body = {"max_tokens": 1, "explain": True}
    with live(llm, hide_texts=True) as server:
        server.post(COMPLETIONS, {**body, "prompt": f"the secret of Alice is {SHARED}"})
        prompt = {"prompt": f"the secret of Bob is {SHARED}"}
        explained = server.post(EXPLAIN, prompt).json()["explanation"]
        assert explained == misses(server.post(COMPLETIONS, {**body, **prompt}).json())
        (miss,) = explained
        assert miss["reason"] == "diverged" and "Bob" in miss["text"]
        assert "Alice" not in miss["text"]
        assert "secret" not in server.get("/v1/cache").text
        found = server.get("/v1/cache/search?text=secret")  # or whoever asks learns by guessing
        assert found.status_code == 403 and "total" not in found.text
        # And the end of somebody's prefix.
        secret = [{"role": "system", "content": "The code is 555-4822"}]
        server.post("/v1/prefixes", {"name": "p", "messages": secret})
        for question in (f"How old {SHARED}", f"Which is {SHARED}"):
            asked = {**body, "prefix": "p", "messages": [user(question)]}
            answer = server.post(CHAT, asked).json()
        (miss,) = misses(answer)
        assert miss["reason"] == "diverged" and "Which" in miss["text"]
        assert "4822" not in miss["text"]


def say(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["explain", *argv])
    return code, *capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = say(capsys, *argv)
    assert (code, out) == (2, "") and err.startswith("radixcache: error: ")
    assert err.count("\n") == 1
    return err


def test_the_command_prints_what_the_engine_itself_would(
    server: LiveServer, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    llm, messages, file = server.backend.llm, ask("How old is Ida Berg?"), tmp_path / "chat.json"
    where = ("--url", f"{server.url}/v1/", "--cache-salt", "command")
    text = QUESTION.format("Ida")
    server.post(COMPLETIONS, {"prompt": QUESTION.format("Ada"), "cache_salt": "command"})
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    file.write_text(json.dumps({"messages": messages, "temperature": 0, "model": "tabletalk"}))
    for prompt, argv in ((text, [text]), (text, ["-"]), (messages, ["--messages", str(file)])):
        said = str(llm.explain(prompt, cache_salt="command"))
        assert ("diverged" in said) == (prompt == text)
        assert say(capsys, *argv, *where) == (0, f"{said}\n", "")
    file.write_text(json.dumps(messages))
    code, out, _ = say(capsys, "--messages", str(file), *where, "--json")
    assert code == 0 and set(json.loads(out)) >= {"prompt_tokens", "cached_tokens", "explanation"}


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b"<html>", "answers is no JSON object"),
        (200, b"[" * 100_000, "answers is no JSON object"),
        (200, b"7", "answers is no JSON object"),
        (200, b'{"prompt_tokens": 1, "cached_tokens": 0, "explanation": 5}', "is no explanation"),
        (404, b"nothing here", "/v1/explain answers 404: Not Found"),
    ],
)
def test_a_server_that_is_none_of_ours_is_told_in_a_sentence(
    capsys: Any, status: int, body: bytes, sentence: str
):
    with stranger(lambda *_: None, status, body) as url:
        assert sentence in refused(capsys, "x", "--url", url)
    assert "no server answers at http://127" in refused(capsys, "x", "--url", url)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_goes_to_the_server_that_was_named_and_to_no_other(capsys: Any, status: int):
    keys: list[Any] = []

    def hear(request: BaseHTTPRequestHandler, _: bytes) -> None:
        keys.append(request.headers["Authorization"])

    with stranger(hear) as elsewhere, stranger(hear, status, to=elsewhere) as url:
        said = refused(capsys, "x", "--url", url, "--api-key", "secret")
    assert f"answers {status}" in said and "secret" not in said
    assert keys == ["Bearer secret"]


def test_what_the_server_refuses_is_told_in_its_own_words(llm: LLM, capsys: Any, monkeypatch: Any):
    with live(llm, api_key="the key") as server:
        where = ("--url", server.url)
        assert "answers 401: a valid API key is needed" in refused(capsys, "x", *where)
        assert say(capsys, "x", *where, "--api-key", "the key")[0] == 0
        monkeypatch.setenv("RADIXCACHE_API_KEY", "the key\n")
        assert say(capsys, "x", *where)[0] == 0
        assert "answers 400: the prompt is empty" in refused(capsys, "", *where)
        assert "surrogate" in refused(capsys, "\udcff", *where)


def test_what_cannot_be_asked_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "chat.json"
    file.write_text("{oops")
    for argv, sentence in (
        ([], "either a prompt or --messages"),
        (["--messages", str(file)], "chat.json is not JSON"),
        (["--messages", "/no/file"], "cannot read /no/file: No such file"),
        (["x", "--url", "file:///etc/passwd"], "a server's address is like http"),
        (["x", "--url", "http://[::1"], "cannot ask http://[::1"),
        (["x", "--api-key", "top\nsecret"], "one line"),
    ):
        told = refused(capsys, *argv)
        assert sentence in told and "secret" not in told
