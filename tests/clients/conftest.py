"""One server for all clients.

Clients whose requirements agree with this project's are tried wherever the tests run. The others
have an environment of their own, without this project in it (`make test-clients`): there, a second
interpreter runs the server.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where the server is, without a path."""
    if python := os.environ.get("SERVER_PYTHON"):
        command = [python, "-m", "tests.clients.serve"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin and process.stdout
            yield process.stdout.readline().strip()
            process.stdin.close()
            assert process.wait(60) == 0, "something was left running"
    else:
        from tests.clients.serve import serve

        with serve() as server:
            yield server.url
            server.assert_idle()


@pytest.fixture
def fresh() -> str:
    """A text that nobody has sent before, so that nothing behind it is cached."""
    return f"Session {uuid.uuid4()}."
