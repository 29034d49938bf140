"""Servers in processes and threads of their own, and streams that are read from them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

from radixcache import LLM
from radixcache.runtime.server.app import create_app
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.listener import address_of, listen
from radixcache.runtime.server.loading import Loading
from tests.helpers.forks import Forked, radixcache
from tests.runtime.server import http
from tests.runtime.server.live import LiveServer

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "| 1 | Nora", "max_tokens": 3000, "ignore_eos": True, "temperature": 2}


@contextmanager
def streaming(server: LiveServer, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of an endless stream, of which the first chunk has come."""
    body = {**ENDLESS, "stream": True, **more}
    with http.stream("POST", f"{server.url}{COMPLETIONS}", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


@contextmanager
def forked(folder: Path, *flags: str) -> Iterator[tuple[Forked, str]]:
    """`radixcache serve` as a process that need not import, and its address."""
    running = Forked(folder, radixcache, "serve", "--port", "0", *flags)
    try:
        end = time.monotonic() + 60
        while not (running.err.exists() and running.err.read_text().count("\n") > 1):
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        yield running, address(running.err.read_text())
    finally:
        running.kill()


def address(line: str) -> str:
    """That of the server which says this; it answers."""
    match = re.match(r"Serving tabletalk at (http://127\.0\.0\.1:\d+)\nqwen3 in", line)
    assert match, line
    end = time.monotonic() + 60
    while True:
        try:
            assert http.get(f"{match[1]}/health", timeout=10).status_code == 200
            return match[1]
        except httpx.TransportError:
            assert time.monotonic() < end
            time.sleep(0.05)


@contextmanager
def loading(**options: Any) -> Iterator[tuple[Loading, str]]:
    """A server whose model loads, and its address."""
    with (
        listen("127.0.0.1", 0) as listener,
        Loading(ServerArgs(shutdown_timeout=1, **options), listener) as server,
    ):
        yield server, address_of(listener)


@contextmanager
def served(server: Loading, llm: LLM, **options: Any) -> Iterator[None]:
    """Its model has come; the command's main thread is this one of ours."""
    app = create_app(llm, ServerArgs(**options))
    serving = threading.Thread(target=server.serve, args=(app, lambda: None))
    serving.start()
    try:
        yield
    finally:
        server._server.should_exit = True
        serving.join(30)
        assert not serving.is_alive()
