"""One server for all clients.

Clients whose requirements agree with this project's are tried wherever the tests run. The others
have an environment of their own, without this project in it (`make test-clients`): there, a second
interpreter runs the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def served() -> Iterator[dict[str, Any]]:
    """Where the servers are; see `tests.clients.serve`."""
    if python := os.environ.get("SERVER_PYTHON"):
        command = [python, "-m", "tests.clients.serve"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin and process.stdout
            yield json.loads(process.stdout.readline())
            process.stdin.close()
            assert process.wait(60) == 0, "something was left running"
    else:
        from tests.clients.serve import serve

        with serve() as served:
            yield served


@pytest.fixture
def url(served: dict[str, Any]) -> str:
    """Where the scripted model is, without a path."""
    return str(served["url"])


@pytest.fixture
def fresh() -> str:
    """A text that nobody has sent before, so that nothing behind it is cached."""
    return f"Session {uuid.uuid4()}."
