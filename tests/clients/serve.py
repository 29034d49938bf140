"""The server that the clients talk to; `python -m tests.clients.serve` for those elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from tests.clients.script import answer
from tests.helpers.scripted import scripted_llm
from tests.runtime.server.live import LiveServer, live


def serve() -> AbstractContextManager[LiveServer]:
    return live(scripted_llm(answer))


if __name__ == "__main__":
    with serve() as server:
        print(server.url, flush=True)
        sys.stdin.read()  # until whoever started it ends
        server.assert_idle()
