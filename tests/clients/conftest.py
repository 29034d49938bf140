"""One server for all clients, and a table of what was tried with which version.

Clients whose requirements agree with this project's are tried wherever the tests run. The others
have an environment of their own, without this project in it (`make test-clients`): there, a second
interpreter runs the server.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Client, version, case, result: where the tests of clients are what runs."""
    rows = set()
    for result, reports in terminalreporter.stats.items():
        for report in reports:
            nodeid = getattr(report, "nodeid", "")
            if nodeid.startswith("tests/clients/test_") and getattr(report, "when", "") == "call":
                file, case = nodeid.split("::")
                client = file.rsplit("/")[-1].removeprefix("test_").removesuffix(".py")
                rows.add((client.replace("_", "-"), case.removeprefix("test_"), result))
    for client, case, result in sorted(rows):
        told = case.replace("_", " ")
        terminalreporter.write_line(f"| {client} {version(client)} | {told} | {result} |")
