"""What a client can ask for is bounded before it is done, and none keeps the others waiting."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from radixcache import LLM, StructuredOutputsParams
from radixcache.runtime.sampling import grammar
from radixcache.runtime.server import pools
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http import access, bodies, serve
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.openai import CompletionRequest
from radixcache.runtime.tokens import tool_calls
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.runtime.server.api.apis import Chat, user
from tests.runtime.server.live import LiveServer, assert_error, live
from tests.runtime.server.processes import COMPLETIONS, streaming

SHORT = {"prompt": "| 1 | Nora", "max_tokens": 2}


@pytest.mark.parametrize("piece", ['"a",', "[],", "[", '{"a": ', '"a" '])
def test_a_body_of_too_many_values_is_not_read(monkeypatch: pytest.MonkeyPatch, piece: str) -> None:
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ApiError, match="the body has more than 1,000,000 values"):
        bodies.read_json(piece.encode() * (tool_calls.MAX_VALUES + 1))


@pytest.mark.parametrize("count", [60_000, 120_000])
def test_names_count_for_more_wherever_json_stands(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Reading them takes ten times as long, and nobody else has a turn meanwhile."""
    names = "{" + ",".join(f'"n{i}":0' for i in range(count)) + "}"
    if count > tool_calls.MAX_VALUES // 10:
        with pytest.raises(ApiError, match="of which a name counts as ten"):
            bodies.read_json(names.encode())
        monkeypatch.setattr(json, "loads", None)
        with pytest.raises(ValueError, match="of which a name counts as ten"):
            tool_calls.read_json(names)  # the arguments of a call
    else:
        assert bodies.read_json(names.encode()) == tool_calls.read_json(names) == json.loads(names)


def test_what_is_refused_for_its_length_is_never_written(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, text = {"type": "object", "description": "x" * (1 << 20)}, json.dumps
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    hello, long = {"messages": [user("Hi")]}, "x" * 100_000
    for more, sentence in (
        ({"tools": [tool]}, "characters of JSON schemas"),
        ({"response_format": form}, "at most"),
        ({"structured_outputs": {"choice": [long]}}, "at most"),
        ({"chat_template_kwargs": {long: 1}}, "takes no xxx"),
    ):

        def write(value: Any, *args: Any, **options: Any) -> str:
            written = text(value, *args, **options)
            assert len(written) < 10_000
            return written

        content = text({**hello, **more})
        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", write)
            head = {"content-type": "application/json"}
            refused = server.post("/v1/chat/completions", content=content, headers=head)
        assert_error(refused, 400, sentence)


@pytest.mark.parametrize("body", ['{"prompt": [7.5]}', '{"prompt": "x", "n": "y"}', '{"prompt'])
def test_nothing_of_a_refused_body_stays(body: str) -> None:
    """Until garbage is collected, which may be never: an error holds frames, and these the body."""
    raw = (body + " " * 10_000).encode()
    gc.disable()
    try:
        before = sys.getrefcount(raw)
        refused = bodies._check(CompletionRequest, raw)
        assert isinstance(refused, ApiError) and sys.getrefcount(raw) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("text", ['"' + r",[{\"\\" * 400_000 + '"', "[" + '"a,[{", ' * 1000 + "1]"])
def test_what_stands_in_texts_does_not_count(text: str) -> None:
    assert bodies.read_json(text.encode()) == json.loads(text)


def test_a_large_body_keeps_no_other_request_waiting(server: LiveServer, monkeypatch: Any) -> None:
    begun, go_on, read = threading.Event(), threading.Event(), bodies.read_json

    def slowly(body: bytes) -> Any:
        if len(body) > bodies.SMALL:
            begun.set()
            assert go_on.wait(30)
        return read(body)

    monkeypatch.setattr(bodies, "read_json", slowly)
    large = {**SHORT, "user": "x" * 2 * bodies.SMALL}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, COMPLETIONS, large)
        assert begun.wait(30) and server.post(COMPLETIONS, SHORT).status_code == 200
        go_on.set()
        assert waiting.result().status_code == 200


def test_large_bodies_have_a_bound_together():
    """And no client takes all of it; what a request holds is free when it ends."""

    async def send_bodies() -> None:
        may_end, limit = asyncio.Event(), 3 << 20

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            await may_end.wait()

        door = access.Access(app, ServerArgs(max_body_size=limit))

        def body_of(size: int, client: str) -> asyncio.Task[None]:
            pieces = [size // 2, size - size // 2]

            async def receive() -> Any:
                await asyncio.sleep(0)
                return {"body": bytes(pieces.pop()), "more_body": bool(pieces)}

            scope = {"type": "http", "method": "POST", "path": "/", "client": (client, 1)}
            head = {"headers": [(b"host", b"localhost")]}
            return asyncio.create_task(door({**scope, **head}, receive, None))  # type: ignore[arg-type]

        async def refused(size: int, client: str) -> bool:
            task = body_of(size, client)
            for _ in range(20):
                await asyncio.sleep(0)
            if not task.done():
                open_tasks.append(task)
                return False
            assert isinstance(task.exception(), ApiError) and "503" in repr(task.exception())
            return True

        open_tasks: list[asyncio.Task[None]] = []
        free, large = access.FREE_BYTES, limit - 1
        for _ in range(5):
            assert not await refused(free, "a"), "small ones are not counted"
        assert [await refused(large, "a") for _ in range(4)] == [False, False, False, True]
        assert [await refused(large, "b") for _ in range(4)] == [False, False, False, True]
        assert await refused(large, "c") and not await refused(free, "c")
        assert door._held == dict.fromkeys("ab", 3 * (large - free))
        may_end.set()
        await asyncio.gather(*open_tasks)
        may_end.clear()
        assert not door._held and not await refused(large, "a")
        may_end.set()
        await open_tasks[-1]

    asyncio.run(send_bodies())


def test_a_text_that_cannot_fit_is_never_tokenised(server: LiveServer, monkeypatch: Any):
    fast, long = type(server.backend.tokenizer._tokenizer), "a" * 500_000
    monkeypatch.setattr(fast, "encode", None)
    monkeypatch.setattr(fast, "__call__", None)
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        ("/v1/chat/completions", {"messages": [user(long)]}),
        ("/tokenize", {"prompt": long}),
        ("/v1/prefixes", {"name": "x", "prompt": long}),
    ):
        error = assert_error(server.post(path, body), 400, "is 4096 tokens. However, the")
        assert error["code"] == "context_length_exceeded"


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
            error = assert_error(refused, 429, "too many completions of this client")
            assert error["type"] == "rate_limit_error" and refused.headers["retry-after"] == "1"
            assert server.post(COMPLETIONS, {**SHORT, "cache_salt": "b"}).status_code == 200
            full = server.post(COMPLETIONS, {**SHORT, "cache_salt": "b", "n": 2})
            assert_error(full, 429, "too many completions are running or waiting")
        assert_error(server.post(COMPLETIONS, {**SHORT, "n": 5}), 400, "takes 4 at most")
        assert server.post(COMPLETIONS, SHORT).status_code == 200, "its places are free again"
        server.assert_idle()


def test_a_long_text_holds_up_no_other_client(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Nor does a client hold more than one thread, however many texts it sends."""
    begun, may_end, encode = threading.Semaphore(0), threading.Event(), Tokenizer.encode

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


def test_tokenising_ends_with_its_client(server: LiveServer, monkeypatch: pytest.MonkeyPatch):
    count, encode = 0, Tokenizer.encode

    def slowly(self: Tokenizer, *args: Any, **options: Any) -> list[int]:
        nonlocal count
        count += 1
        time.sleep(0.01)
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slowly)
    body = json.dumps({"prompt": ["a"] * 500, "max_tokens": 1}).encode()
    with connect(server) as connection:
        head = COMPLETIONS_HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        while not count:
            time.sleep(0.005)
    time.sleep(0.2)
    seen = count
    time.sleep(0.1)
    assert count == seen < 250
    server.assert_idle()


def test_an_answer_is_remembered_before_the_next_conversation_is_tokenised(
    scripted: LiveServer, monkeypatch: pytest.MonkeyPatch
):
    """However long that takes, its tokens are found again."""
    conversations = scripted.backend.llm.turns
    remember = conversations.remember

    def remember_late(*args: Any) -> None:
        time.sleep(0.3)
        remember(*args)

    monkeypatch.setattr(conversations, "remember", remember_late)
    api, question = Chat(scripted.url, False), user("Loop, remembered")
    tools = [{"name": "step", "parameters": {"type": "object"}}]
    first = api.ask(question, tools=tools)
    second = api.ask(question, *first.said, api.result(first.calls[0], "7"), tools=tools)
    assert second.cached == first.prompt + first.completion - 1


def test_who_asks_for_a_new_structure_keeps_no_plain_request_waiting(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, go_on = server.backend.llm.grammar_backend, threading.Event()
    compile_one = backend.compile

    def slowly(structured: StructuredOutputsParams) -> Any:
        assert go_on.wait(30)
        return compile_one(structured)

    monkeypatch.setattr(backend, "compile", slowly)
    with ThreadPoolExecutor(8) as pool:
        structures = [{**SHORT, "structured_outputs": {"regex": f"a{i}"}} for i in range(8)]
        waiting = [pool.submit(server.post, COMPLETIONS, body) for body in structures]
        for _ in range(5):
            assert server.post(COMPLETIONS, SHORT).status_code == 200
        assert not any(one.done() for one in waiting)
        monkeypatch.setattr(pools, "MAX_COMPILING", 16)  # half of them for one client
        another = {**SHORT, "structured_outputs": {"regex": "another"}}
        assert_error(server.post(COMPLETIONS, another), 503, "too many new structures")
        go_on.set()


def test_a_grammar_that_cannot_be_followed_is_the_clients_fault(server: LiveServer, monkeypatch):
    def broken(*_: Any) -> None:
        raise grammar.GrammarError("the structure cannot be followed: too many items")

    body = {"prompt": "a", "structured_outputs": {"regex": "[ab]{9}"}}
    assert server.post(COMPLETIONS, body).status_code == 200
    monkeypatch.setattr(grammar.Grammar, "is_complete", broken)
    assert_error(server.post(COMPLETIONS, body), 400, "cannot be followed")


def connect(server: LiveServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(server: LiveServer, sent: bytes, *more: bytes) -> bytes:
    """All that comes before the server closes a connection, on which this was sent."""
    with connect(server) as connection:
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


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
COMPLETIONS_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


def test_a_head_that_does_not_come_ends_the_connection(server: LiveServer, monkeypatch: Any):
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    assert b"200 OK" not in answer(server, b"") + answer(server, HEALTH)
    # With its first byte uvicorn's own limit, for the time between two requests, has ended.
    assert answer(server, HEALTH + b"\r\n", b"GET /health HT").count(b"HTTP/1.1 200 OK") == 1


def test_heads_that_are_too_large_or_tell_two_ends_of_a_body_are_refused(server: LiveServer):
    received = answer(server, b"GET /health HTTP/1.1\r\nHost: " + b"x" * 100_000)
    assert received == b"" or received.startswith(b"HTTP/1.1 400")
    long = HEALTH + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n"
    assert answer(server, long).startswith(b"HTTP/1.1 400")
    two = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    said = answer(server, COMPLETIONS_HEAD + two)
    assert said.startswith(b"HTTP/1.1 400") and b"exclude each other" in said


@pytest.mark.parametrize("body", [b"", b'{"prompt": '])
def test_a_body_that_does_not_come_is_408(server: LiveServer, body: bytes, monkeypatch: Any):
    monkeypatch.setattr(access, "BODY_SECONDS", 0.2)
    received = answer(server, COMPLETIONS_HEAD + b"Content-Length: 100\r\n\r\n" + body)
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
    message = json.loads(content)["error"]["message"]
    assert message == "the request's body did not come within 0.2 seconds"


@pytest.mark.parametrize("head", [
    HEALTH + b"Content-Length: 100\r\n\r\nx",
    COMPLETIONS_HEAD.replace(b"comp", b"x") + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
    COMPLETIONS_HEAD + b"Content-Length: 99999999999\r\n\r\n[",
])  # fmt: skip
def test_an_answer_before_the_body_closes_the_connection(server, monkeypatch, head: bytes):
    monkeypatch.setattr(serve, "LINGER_SECONDS", 0.1)
    whole = HEALTH + b"Content-Length: 1\r\n\r\nx"  # a body that nobody reads, but that has come
    said = answer(server, whole + whole + head)
    assert said.count(b"HTTP/1.1") == 3 and said.lower().count(b"connection: close") == 1


def test_chunks_of_one_byte_are_read_in_pieces_between_which_others_are_served(server, monkeypatch):
    read, seen = serve._Connection.data_received, list[Any]()

    def watch(own, data):
        read(own, data)
        seen.append((len(data), own.transport.is_reading()))

    monkeypatch.setattr(serve._Connection, "data_received", watch)
    monkeypatch.setattr(serve, "REST_SECONDS", 0.001)
    monkeypatch.setattr(serve, "BUSY_SECONDS", 0)
    text = json.dumps(SHORT).encode() + b" " * 9000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    head = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b" 200 OK" in answer(server, COMPLETIONS_HEAD + head + chunks)
    assert len(seen) > 20 and max(seen) == (serve.READ_BYTES, False)  # each piece, then a rest


def test_a_loop_may_read_as_much_at_once_as_it_likes(server, monkeypatch) -> None:
    transport = asyncio.selector_events._SelectorTransport  # type: ignore[attr-defined]
    monkeypatch.setattr(transport, "max_size", property(lambda own: 1 << 18))  # as uvloop's
    assert b" 200 OK" in answer(server, HEALTH + b"Connection: close\r\n\r\n")


def test_an_early_answer_goes_out_when_the_server_shuts_down() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def end_while_it_waits() -> None:
        conn: Any = SimpleNamespace(
            their_state=h11.SEND_BODY, they_are_waiting_for_100_continue=False
        )
        receive: Any = asyncio.Event().wait
        answer = asyncio.create_task(serve._closing(app, conn)({}, receive, send))
        await asyncio.sleep(0.01)
        answer.cancel()
        await answer

    asyncio.run(end_while_it_waits())
    assert [message["headers"] for message in sent] == [[(b"connection", b"close")]]
