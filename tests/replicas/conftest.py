"""Three replicas of the bundled model on a Ray of their own, for `make test-replicas`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import pytest
from openai import AsyncOpenAI

from radixcache.runtime.server.http.listener import listen

KEY, ADMIN = "a client's key", "the admin's key"
KV_TOKENS = 4096


class Deployment:
    """A running `radixcache serve --replicas`, asked by its administrator."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(
            base_url=url, timeout=60, headers={"Authorization": f"Bearer {ADMIN}"}
        )

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What `/v1/replicas` tells of each."""
        found = self.http.get("/v1/replicas").json()["replicas"]
        return {replica["replica"]: replica for replica in found}

    def wait_for(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until `count` replicas run."""
        end = time.monotonic() + 120
        while len(self.replicas()) != count:
            assert time.monotonic() < end, "not that many replicas came"
            time.sleep(0.2)
        return self.replicas()

    def metric(self, name: str, labels: str = "") -> dict[str, float]:
        """A metric of each replica; `labels` are those behind its name."""
        lines = self.http.get("/metrics").text.splitlines()
        start = f'{name}{{replica="'
        return {
            line[len(start) :].partition('"')[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(start) and labels in line
        }

    def client(self) -> AsyncOpenAI:
        """An OpenAI client that does not try again by itself."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def free_port() -> int:
    """One that was free a moment ago."""
    with listen("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def environment() -> dict[str, str]:
    """For a process that starts Ray: its workers must find this checkout."""
    settings = {"PYTHONPATH": os.getcwd(), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **settings}


@pytest.fixture(scope="session")
def deployment() -> Iterator[Deployment]:
    pytest.importorskip("ray")
    with deployed("--replicas", "3") as (found, process):
        yield found
        _drain(found, process)
        assert process.wait(60) == signal.SIGTERM  # Ray's handler exits with its number


@contextmanager
def deployed(*flags: str, **more: str) -> Iterator[tuple[Deployment, subprocess.Popen[bytes]]]:
    """A server of these flags and settings, and its process, which is killed in the end."""
    port = free_port()
    command = [sys.executable, "-m", "radixcache", "serve", *flags, "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(KV_TOKENS * 4096)]
    command += ["--api-key", KEY, "--admin-key", ADMIN]
    process = subprocess.Popen(command, env={**environment(), **more})
    try:
        found = Deployment(f"http://127.0.0.1:{port}")
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < end, "it did not start"
            try:
                assert found.http.get("/health").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield found, process
    finally:
        process.kill()


def _drain(deployment: Deployment, process: subprocess.Popen[bytes]) -> None:
    """On SIGTERM what runs ends as if nothing had happened, and nothing more is taken."""
    body = {"prompt": "A story.", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with deployment.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert deployment.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        *_, last, end = (line for line in lines if line)
    assert end == "data: [DONE]" and '"finish_reason":"length"' in last, last
