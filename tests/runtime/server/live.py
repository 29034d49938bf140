"""A server on a free port, in a thread of the test's process, so that a test can look inside."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2 as httpx
import uvicorn

from radixcache import LLM
from radixcache.runtime.demo.script import TABLE
from radixcache.runtime.server.app import create_app
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.listener import listen
from radixcache.runtime.server.http.serve import configure
from radixcache.runtime.server.serving import ServingContext
from tests.runtime.server import http

T = TypeVar("T")

SYSTEM = {"role": "system", "content": TABLE.read_text()}


def ask(text: str) -> list[dict[str, str]]:
    """A conversation about the table, with one question."""
    return [SYSTEM, {"role": "user", "content": text}]


def assert_error(response: Any, status: int, sentence: str) -> dict[str, Any]:
    """It is an error in OpenAI's shape; returns what it says."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert sentence in error["message"] and "\n" not in error["message"]
    return error


def empty(llm: LLM) -> None:
    """Nothing is cached or pinned any more."""
    for prefix in llm.prefixes.list():
        llm.prefixes.unpin(prefix.name, prefix.cache_salt)
    llm.reset_prefix_cache()


class LiveServer:
    """A running server and what is behind it."""

    def __init__(self, url: str, backend: ServingContext) -> None:
        self.url = url
        self.backend = backend
        self.engine = backend.llm.engine

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, run on the engine's thread."""
        return self.backend.llm.worker.call(function).result(30)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return http.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return http.get(f"{self.url}{path}", timeout=60, **options)

    def delete(self, path: str) -> httpx.Response:
        return http.delete(f"{self.url}{path}", timeout=60)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until `holds`, which is called on the engine's thread."""
        end = time.monotonic() + seconds
        while not self.call(holds):
            assert time.monotonic() < end, "it never came about"
            time.sleep(0.005)

    def forget(self) -> None:
        """Nothing is cached or pinned any more."""
        self.call(lambda: empty(self.backend.llm))

    def assert_idle(self) -> None:
        """Nothing runs, no lease but those of pins lives, and the cache's invariants hold."""
        self.wait_until(lambda: not self.engine.has_work)

        def check() -> None:
            self.engine.cache.check()
            assert len(self.engine.cache._leases) == len(self.engine.cache.pins)

        self.call(check)
        jobs = self.backend.jobs
        assert not jobs._open and not jobs._num_sequences and not jobs.worker._streams
        assert not self.backend.metrics._last_token


class Server(uvicorn.Server):
    """Looks often whether it should exit; uvicorn does every 100 ms."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.02)


@contextmanager
def live(llm: LLM, **options: Any) -> Iterator[LiveServer]:
    """A server of `llm` with these `ServerArgs`."""
    app = create_app(llm, ServerArgs(**options))
    uvicorn_server = Server(configure(app, "critical"))
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=uvicorn_server.run, args=([listener],))
        thread.start()
        try:
            end = time.monotonic() + 30
            while not uvicorn_server.started:
                assert time.monotonic() < end
                time.sleep(0.01)
            yield LiveServer(f"http://127.0.0.1:{port}", app.state.context)
        finally:
            uvicorn_server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
