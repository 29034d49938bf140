"""httpx without certificates: to load them takes longer than most requests of a test. And servers
that are none of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2 as httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
delete = partial(httpx.delete, verify=False)
stream = partial(httpx.stream, verify=False)


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

        do_GET = do_POST  # noqa: N815

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
