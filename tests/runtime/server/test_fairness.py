"""One client against all: slots, places in the queue, the tokenizer, and connections left open."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from radixcache import LLM
from radixcache.runtime.server.http import deadline, serve
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.runtime.server.live import LiveServer, live
from tests.runtime.server.test_errors import assert_error
from tests.runtime.server.test_lifecycle import COMPLETIONS, streaming

SHORT = {"prompt": "| 1 | Nora", "max_tokens": 2}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_cache_memory_bytes="16MiB", max_num_seqs=2)


# Slots and places.


def test_a_client_with_all_slots_keeps_no_other_waiting(llm: LLM):
    with live(llm) as server:
        with streaming(server, n=2, cache_salt="a"):
            assert server.post(COMPLETIONS, {**SHORT, "cache_salt": "b"}).status_code == 200
            assert server.post(COMPLETIONS, SHORT).status_code == 200  # by its address
            assert server.call(lambda: len(server.engine.scheduler.open)) == 2, "they had ended"
        server.assert_idle()


def test_no_client_gets_all_places_in_the_queue(llm: LLM):
    """Of two slots and three places it gets two and two."""
    with live(llm, max_queued_requests=3) as server:
        with streaming(server, n=4, cache_salt="a"):
            refused = server.post(COMPLETIONS, {**SHORT, "cache_salt": "a"})
            assert_error(refused, 429, "too many completions of this client")
            assert refused.headers["retry-after"] == "1"
            assert server.post(COMPLETIONS, {**SHORT, "cache_salt": "b"}).status_code == 200
            full = server.post(COMPLETIONS, {**SHORT, "cache_salt": "b", "n": 2})
            assert_error(full, 429, "too many completions are running or waiting")
        assert_error(server.post(COMPLETIONS, {**SHORT, "n": 5}), 400, "takes 4 at most")
        server.assert_idle()


# The tokenizer.


def test_a_long_text_holds_up_no_other_client(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Nor does a client hold more than one thread, however many texts it sends."""
    begun, may_end = threading.Semaphore(0), threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if text == "long":
            begun.release()
            assert may_end.wait(30)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    with live(llm) as server, ThreadPoolExecutor(6) as pool:
        long = [pool.submit(server.post, "/tokenize", {"prompt": "long"}) for _ in range(5)]
        assert begun.acquire(timeout=30)
        assert server.post(COMPLETIONS, {**SHORT, "cache_salt": "b"}).status_code == 200
        assert not any(answer.done() for answer in long)
        assert not begun.acquire(blocking=False), "another one of the same client has begun"
        may_end.set()
        assert {answer.result().status_code for answer in long} == {200}
        server.assert_idle()


def test_an_answer_is_remembered_before_the_next_conversation_is_tokenised(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    history, encode, remember = llm.history, llm.history.encode, llm.history.remember

    def note_encode(*args: Any) -> Any:
        order.append("encode")
        return encode(*args)

    def remember_late(*args: Any) -> None:
        time.sleep(0.2)
        order.append("remember")
        remember(*args)

    monkeypatch.setattr(history, "encode", note_encode)
    monkeypatch.setattr(history, "remember", remember_late)
    body = {"messages": [{"role": "user", "content": "How?"}], "max_tokens": 2}
    with live(llm) as server:
        for _ in range(2):
            assert server.post("/v1/chat/completions", body).status_code == 200
        server.wait_until(lambda: len(order) == 4)
    assert order == ["encode", "remember"] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 500_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 500_000}]}),
        ("/tokenize", {"prompt": "a" * 500_000}),
        ("/v1/prefixes", {"name": "x", "prompt": "a" * 500_000}),
    ],
)
def test_a_text_that_cannot_fit_is_never_tokenised(
    server: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    texts: list[str] = []

    def count(*args: Any, **options: Any) -> None:
        texts.append(args[-1])

    fast = type(server.backend.tokenizer._tokenizer)
    monkeypatch.setattr(fast, "encode", count)
    monkeypatch.setattr(fast, "__call__", count)
    error = assert_error(server.post(path, body), 400, "too long for the context of 4096")
    assert error["code"] == "context_length_exceeded" and not texts


# Stop strings.


@pytest.mark.parametrize("stop", [["x"] * 65, "x" * 4097, ["x" * 2000] * 3])
def test_stop_strings_are_limited_in_number_and_in_all_their_length(server: LiveServer, stop: Any):
    refused = server.post(COMPLETIONS, {**SHORT, "stop": stop})
    assert_error(refused, 400, "stop: at most 64 strings of 4096 characters together")
    fine = {**SHORT, "stop": ["x" * 64] * 64}
    assert server.post(COMPLETIONS, fine).status_code == 200


# Connections.


def answer(server: LiveServer, sent: bytes, *more: bytes) -> bytes:
    """All that comes before the server closes a connection, on which this was sent."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        try:
            while data := connection.recv(1 << 16):
                received += data
                for part in more:
                    connection.sendall(part)
                more = ()
        except ConnectionResetError:
            pass
    return received


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(
    server: LiveServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.2)
    assert answer(server, sent) == b""


def test_nor_does_half_a_head_after_an_answer_keep_a_connection(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
):
    """With its first byte uvicorn's own limit, for the time between two requests, has ended."""
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = answer(server, request, b"GET /health HT")
    assert received.count(b"HTTP/1.1 200 OK") == 1


def test_a_head_that_is_too_large_is_refused(server: LiveServer):
    received = answer(server, b"GET /health HTTP/1.1\r\nHost: " + b"x" * 100_000)
    assert received == b"" or received.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("body", [b"", b'{"prompt": '])
def test_a_body_that_does_not_come_is_408(
    server: LiveServer, body: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deadline, "BODY_SECONDS", 0.2)
    received = answer(server, HEAD + b"Content-Length: 100\r\n\r\n" + body)
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
    message = json.loads(content)["error"]["message"]
    assert message == "the request's body did not come within 0.2 seconds"


def test_an_answer_may_take_longer_than_a_body(monkeypatch: pytest.MonkeyPatch):
    """A client that hangs up is waited for, behind a whole body, for as long as it takes."""
    monkeypatch.setattr(deadline, "BODY_SECONDS", 0.05)
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["type"])
        heard.append((await receive())["type"])

    async def receive() -> Any:
        if not heard:
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.sleep(0.15)
        return {"type": "http.disconnect"}

    asyncio.run(deadline.BodyDeadline(app)({"type": "http"}, receive, None))  # type: ignore[arg-type]
    assert heard == ["http.request", "http.disconnect"]


def test_a_body_that_is_half_there_when_the_server_ends_is_503() -> None:
    """uvicorn cancels what still runs; that is no failure of the app."""

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def run() -> None:
        messages = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> Any:
            for message in messages:
                return message
            await asyncio.sleep(60)
            raise AssertionError

        app = deadline.BodyDeadline(read)
        task = asyncio.ensure_future(app({"type": "http"}, receive, None))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(HTTPException, match="shutting down") as refused:
            await task
        assert refused.value.status_code == 503

    asyncio.run(run())
