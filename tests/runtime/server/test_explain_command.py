"""`radixcache explain` and the route that it asks: what is cached, without computing anything."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from radixcache import LLM
from radixcache.runtime.cli import main
from tests.runtime.server.live import LiveServer, ask, assert_error, live

EXPLAIN, CHAT, COMPLETIONS = "/v1/explain", "/v1/chat/completions", "/v1/completions"
QUESTION = "Question: how old is {} in this table of all members? Your answer:"
SALTED = {"cache_salt": "test_explain_command"}


def say(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["explain", *argv])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("path", "before", "now"),
    [
        (CHAT, {"messages": ask("How old is Nora Lund?")}, {"messages": ask("Who is Ada Byron?")}),
        (COMPLETIONS, {"prompt": QUESTION.format("Ada")}, {"prompt": QUESTION.format("Hugo")}),
    ],
)
def test_it_is_explained_as_the_request_is_when_it_comes(
    server: LiveServer, path: str, before: dict[str, Any], now: dict[str, Any]
):
    more = {**SALTED, "max_tokens": 1, "temperature": 0}
    server.post(path, {**before, **more})

    def state() -> object:
        llm = server.backend.llm
        return repr(llm.cache.stats), dict(llm.explainer.missed_tokens), server.engine.num_generated

    seen = server.call(state)
    told = server.post(EXPLAIN, {**now, **more}).json()
    assert server.post(EXPLAIN, {**now, **SALTED}).json() == told
    assert server.call(state) == seen, "nothing is computed, counted or changed"

    answer = server.post(path, {**now, **more, "explain": True}).json()
    assert told["explanation"] == answer["radixcache"]["explanation"] != []
    details = answer["usage"]["prompt_tokens_details"]
    assert told["cached_tokens"] == details["cached_tokens"]
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    lengths = sum(miss["end"] - miss["start"] for miss in told["explanation"])
    assert told["cached_tokens"] + lengths + 1 == told["prompt_tokens"]
    whole = server.post(EXPLAIN, {**now, **SALTED}).json()
    assert (whole["cached_tokens"], whole["explanation"]) == (told["prompt_tokens"], [])
    assert server.post(EXPLAIN, now).json()["cached_tokens"] < whole["cached_tokens"]
    server.assert_idle()


@pytest.mark.parametrize("prompt", [[10**9], [-1], [5] * 5000])
def test_what_no_request_could_ask_for_is_not_explained_either(
    server: LiveServer, prompt: list[int]
):
    told = server.post(EXPLAIN, {"prompt": prompt})
    asked = server.post(COMPLETIONS, {"prompt": prompt})
    assert_error(told, 400, "prompt")
    assert told.json() == asked.json()


def test_a_prefix_comes_before_it(server: LiveServer):
    pinned = {"name": "explained", "messages": ask("?")[:1], **SALTED}
    assert server.post("/v1/prefixes", pinned).status_code == 200
    body = {"messages": ask("Who?")[1:], "prefix": "explained", **SALTED}
    told = server.post(EXPLAIN, body).json()
    whole = server.post(EXPLAIN, {"messages": ask("Who?"), **SALTED}).json()
    assert told == whole and told["cached_tokens"] > 1000
    assert_error(server.post(EXPLAIN, {**body, "cache_salt": "x"}), 404, "no prefix named")
    server.call(lambda: server.backend.llm.prefixes.unpin("explained", SALTED["cache_salt"]))
    server.assert_idle()


def test_texts_of_others_are_hidden_here_too():
    with live(LLM(kv_cache_memory_bytes="16MiB"), hide_texts=True) as server:
        server.post(COMPLETIONS, {"prompt": QUESTION.format("Alice"), "max_tokens": 1})
        (miss,) = server.post(EXPLAIN, {"prompt": QUESTION.format("Bob")}).json()["explanation"]
        assert miss["reason"] == "diverged" and "Bob" in miss["text"] and "Al" not in miss["text"]


def test_the_command_prints_what_the_engine_itself_would(
    server: LiveServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    llm, messages, file = server.backend.llm, ask("How old is Ida Berg?"), tmp_path / "chat.json"
    where = ("--url", f"{server.url}/v1/", "--cache-salt", "command")
    server.post(CHAT, {"messages": messages[:1] + ask("Hi?")[1:], "cache_salt": "command"})
    text = QUESTION.format("Ida")
    server.post(COMPLETIONS, {"prompt": QUESTION.format("Ada"), "cache_salt": "command"})

    said = str(llm.explain(text, cache_salt="command"))
    assert "diverged" in said and said.endswith("- the last token is computed for its logits")
    assert say(capsys, text, *where) == (0, f"{said}\n", "")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert say(capsys, "-", *where) == (0, f"{said}\n", "")

    chat = str(llm.explain(messages, cache_salt="command"))
    for content in (messages, {"messages": messages, "temperature": 0, "model": "tabletalk"}):
        file.write_text(json.dumps(content))
        assert say(capsys, "--messages", str(file), *where) == (0, f"{chat}\n", "")
    code, out, _ = say(capsys, "--messages", str(file), *where, "--json")
    assert code == 0 and set(json.loads(out)) >= {"prompt_tokens", "cached_tokens", "explanation"}


@contextmanager
def stranger(status: int, body: bytes, to: str = "") -> Iterator[str]:
    """The address of a server that says the same to everybody, or sends them `to` another."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            if to:
                self.send_header("Location", to)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = say(capsys, *argv)
    assert (code, out) == (2, "") and err.startswith("radixcache: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b"<html>", "answers is no JSON object"),
        (200, b"[" * 100_000, "answers is no JSON object"),
        (200, b"7", "answers is no JSON object"),
        (200, b"{}", "answers is no explanation"),
        (200, b'{"prompt_tokens": 1, "cached_tokens": 0, "explanation": 5}', "is no explanation"),
        (404, b"nothing here", "/v1/explain answers 404: Not Found"),
        (500, b'{"error": "x"}', "/v1/explain answers 500: Internal Server Error"),
    ],
)
def test_a_server_that_is_none_of_ours_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], status: int, body: bytes, sentence: str
):
    with stranger(status, body) as url:
        assert sentence in refused(capsys, "x", "--url", url)
    assert "no server answers at http://127" in refused(capsys, "x", "--url", url)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_goes_to_the_server_that_was_named_and_to_no_other(
    capsys: pytest.CaptureFixture[str], status: int
):
    asked: list[Any] = []

    class Thief(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Thief) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            with stranger(status, b"", f"http://127.0.0.1:{http.server_port}/") as url:
                said = refused(capsys, "x", "--url", url, "--api-key", "secret")
        finally:
            http.shutdown()
            thread.join()
    assert f"answers {status}" in said and "secret" not in said
    assert asked == []


def test_what_the_server_refuses_is_told_in_its_own_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with live(LLM(kv_cache_memory_bytes="16MiB"), api_key="the key") as server:
        where = ("--url", server.url)
        assert "answers 401: a valid API key is needed" in refused(capsys, "x", *where)
        assert say(capsys, "x", *where, "--api-key", "the key")[0] == 0
        assert "401" in refused(capsys, "x", *where, "--api-key", "another")
        monkeypatch.setenv("RADIXCACHE_API_KEY", "the key\n")
        assert say(capsys, "x", *where)[0] == 0
        assert "answers 400: the prompt is empty" in refused(capsys, "", *where)
        assert "surrogate" in refused(capsys, "\udcff", *where)


def test_what_cannot_be_asked_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "chat.json"
    file.write_text("{oops")
    assert "either a prompt or --messages" in refused(capsys)
    assert "either a prompt or --messages" in refused(capsys, "x", "--messages", str(file))
    assert "chat.json is not JSON" in refused(capsys, "--messages", str(file))
    assert "cannot read /no/file: No such file" in refused(capsys, "--messages", "/no/file")
    for url in ("file:///etc/passwd", "127.0.0.1:8000", ""):
        assert "a server's address is like http" in refused(capsys, "x", "--url", url)
    assert "cannot ask http://[::1" in refused(capsys, "x", "--url", "http://[::1")
    told = refused(capsys, "x", "--api-key", "top\nsecret")
    assert "one line" in told and "secret" not in told
