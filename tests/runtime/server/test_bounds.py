"""What a client can ask for is bounded before it is done, and ends with the client."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest

from radixcache import LLM, StructuredOutputsParams
from radixcache.errors import Busy
from radixcache.runtime.server.http import bodies
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.runtime.server.live import LiveServer, ask, live

MANY = bodies.MAX_VALUES + 1


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.fixture
def nothing_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)


# What a body may hold.


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": [' + ",".join(['"a"'] * MANY) + "]}",
        '{"prompt": [' + ",".join(["[]"] * MANY) + "]}",
        "[" * MANY,
        '{"a": {' * MANY,
        '"a" ' * MANY,
    ],
    ids=["texts", "lists", "depth", "objects", "no JSON at all"],
)
def test_a_body_of_too_many_values_is_not_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ApiError, match="the body has more than 1,000,000 values"):
        bodies.read_json(text.encode())


@pytest.mark.parametrize("text", ['"' + r",[{\"\\" * 400_000 + '"', "[" + '"a,[{", ' * 1000 + "1]"])
def test_what_stands_in_texts_does_not_count(text: str) -> None:
    assert bodies.read_json(text.encode()) == json.loads(text)


def test_a_large_body_is_read_on_a_thread_and_a_small_one_at_once(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    read = bodies.read_json

    def note(body: bytes) -> Any:
        readers.append(threading.current_thread().name)
        return read(body)

    monkeypatch.setattr(bodies, "read_json", note)
    for spaces in (0, 2 * bodies.SMALL):
        body = json.dumps({"prompt": "a", "max_tokens": 1}) + " " * spaces
        headers = {"Content-Type": "application/json"}
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, content=body, headers=headers).status_code == 200
    assert "bodies" not in readers[0] and "bodies" in readers[1]


@pytest.mark.usefixtures("nothing_is_tokenised")
def test_more_prompts_than_have_places_are_refused_before_any_work(server: LiveServer) -> None:
    share = server.backend.jobs.share
    body: dict[str, Any] = {"prompt": ["a"] * (share + 1)}
    assert f"takes {share} at most" in refusal(server.post("/v1/completions", body))
    body = {"prompt": ["a"] * (share // 2 + 1), "n": 2}
    assert f"takes {share} at most" in refusal(server.post("/v1/completions", body))


def test_bounds_of_single_fields(server: LiveServer) -> None:
    bias = {str(token): 1 for token in range(10_001)}
    body: dict[str, Any] = {"prompt": "a", "logit_bias": bias}
    assert "at most 10000 tokens have a bias" in refusal(server.post("/v1/completions", body))
    body = {"tokens": [1] * 100_001}
    assert "at most 100000" in refusal(server.post("/detokenize", body))
    schema = {"type": "object", "description": "x" * (1 << 16)}
    body = {"prompt": "a", "structured_outputs": {"json": schema}}
    assert "65536 at most" in refusal(server.post("/v1/completions", body))
    tool = {"name": "f", "parameters": {"type": "object", "description": "x" * (1 << 20)}}
    body = {"messages": ask("?"), "tools": [{"type": "function", "function": tool}]}
    assert "JSON schemas in all tools" in refusal(server.post("/v1/chat/completions", body))


def test_a_long_name_is_not_told_back(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"model": "x" * 1_000_000, "prompt": "a"})
    assert len(refusal(answer, 404)) < 1100


def test_tokenising_ends_with_its_client(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, encode = 0, Tokenizer.encode

    def slowly(self: Tokenizer, *args: Any, **options: Any) -> list[int]:
        nonlocal count
        count += 1
        time.sleep(0.01)
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slowly)
    body = json.dumps({"prompt": ["a"] * 500, "max_tokens": 1}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        while not count:
            time.sleep(0.005)
    time.sleep(0.2)
    seen = count
    time.sleep(0.1)
    assert count == seen < 250
    server.assert_idle()


def test_two_ways_to_tell_a_bodys_end_close_the_connection(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 3\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        said = b"".join(iter(lambda: connection.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 400") and b"exclude each other" in said


# Grammars.


def test_who_asks_for_a_new_structure_keeps_no_plain_request_waiting(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar_backend, go_on = server.backend.llm.grammar_backend, threading.Event()
    compile_one = grammar_backend.compile

    def slowly(structured: StructuredOutputsParams) -> Any:
        assert go_on.wait(30)
        return compile_one(structured)

    monkeypatch.setattr(grammar_backend, "compile", slowly)
    waiting = [
        threading.Thread(
            target=server.post,
            args=("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": f"a{i}"}}),
        )
        for i in range(8)
    ]
    for thread in waiting:
        thread.start()
    try:
        for _ in range(5):
            assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    finally:
        go_on.set()
        for thread in waiting:
            thread.join()


def test_too_many_new_structures_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixcache.runtime.server import serving as backend

    monkeypatch.setattr(backend, "MAX_COMPILING", 0)
    body = {"prompt": "a", "structured_outputs": {"regex": "never seen"}}
    with LLM(kv_cache_memory_bytes="16MiB") as llm, live(llm) as server:
        answer = server.post("/v1/completions", body)
        assert "try again" in refusal(answer, 503) and answer.headers["Retry-After"] == "1"

        def busy(_: StructuredOutputsParams) -> Any:
            raise Busy("other structures take long to compile: try again")

        monkeypatch.setattr(backend, "MAX_COMPILING", 8)
        monkeypatch.setattr(llm.grammar_backend, "compile", busy)
        answer = server.post("/v1/completions", body)
        assert "try again" in refusal(answer, 503) and answer.headers["Retry-After"] == "1"


def test_a_grammar_that_cannot_be_followed_is_the_clients_fault(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixcache.runtime.sampling import grammar as grammar_backend

    def broken(*_: Any) -> None:
        raise grammar_backend.GrammarError("the structure cannot be followed: too many items")

    body = {"prompt": "a", "structured_outputs": {"regex": "[ab]{9}"}}
    assert server.post("/v1/completions", body).status_code == 200
    monkeypatch.setattr(grammar_backend.Grammar, "is_complete", broken)
    assert "cannot be followed" in refusal(server.post("/v1/completions", body))


# Looks at the cache.


def test_equal_looks_that_wait_share_one_walk(server: LiveServer) -> None:
    cache = server.engine.cache
    walks, outline, go_on = 0, cache.outline, threading.Event()

    def counted() -> Any:
        nonlocal walks
        walks += 1
        return outline()

    cache.outline = counted  # type: ignore[method-assign]
    try:
        held = server.backend.llm.worker.call(lambda: go_on.wait(30))
        threads = [
            threading.Thread(target=server.get, args=("/v1/cache?rows=7",)) for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        go_on.set()
        held.result(30)
        for thread in threads:
            thread.join()
    finally:
        del cache.outline
    assert 1 <= walks <= 2
