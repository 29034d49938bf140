"""httpx without certificates: to load them takes longer than most requests of a test. And servers
that are none of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2 as httpx


def get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, verify=False, **options)


def post(url: str, **options: Any) -> httpx.Response:
    return httpx.post(url, verify=False, **options)


def delete(url: str, **options: Any) -> httpx.Response:
    return httpx.delete(url, verify=False, **options)


def stream(method: str, url: str, **options: Any) -> AbstractContextManager[httpx.Response]:
    return httpx.stream(method, url, verify=False, **options)


@contextmanager
def stranger(
    hear: Callable[[BaseHTTPRequestHandler, bytes], object],
    status: int = 200,
    body: bytes = b"",
    to: str = "",
) -> Iterator[str]:
    """The address of a server that answers everybody the same, or sends them `to` another."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hear(self, self.rfile.read(int(self.headers.get("content-length", 0))))
            self.send_response(status)
            if to:
                self.send_header("Location", to)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
