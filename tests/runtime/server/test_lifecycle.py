"""Hanging up, limits, failures of the engine, and the end of a server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

from radixcache import LLM
from radixcache.runtime.cli import main
from radixcache.runtime.engine.worker import MAX_FAILED_STEPS
from radixcache.runtime.server.app import create_app
from tests.helpers.forks import Forked
from tests.runtime.server import http
from tests.runtime.server.live import assert_error, live
from tests.runtime.server.processes import COMPLETIONS, ENDLESS, forked, streaming


def test_a_request_that_takes_too_long_ends(llm: LLM):
    with live(llm, request_timeout=0.5) as server:
        assert_error(server.post(COMPLETIONS, ENDLESS), 504, "not finished within 0.5 seconds")
        with streaming(server) as lines:
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert rest[-1] == "data: [DONE]"
        server.assert_idle()


def test_a_body_that_is_too_large_is_413_though_it_does_not_say_so_first(llm: LLM):
    with live(llm, max_body_size=1000) as server:
        headers = {"content-type": "application/json"}
        chunks = (b'{"prompt": "', *[b"x" * 100] * 10, b'"}')
        chunked = server.post(COMPLETIONS, content=iter(chunks), headers=headers)
        assert_error(chunked, 413, "larger than 1000 bytes")
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_waiting_requests_survive_the_failure_of_those_that_run(llm: LLM, monkeypatch: Any):
    forward, failures = llm.engine.model.forward, iter(range(MAX_FAILED_STEPS))

    def fail(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise RuntimeError("no luck")
        return forward(*args)

    with live(llm) as server, ThreadPoolExecutor(1) as pool:
        # Two that have nothing in common: of twins, one leaves its place to the third for a step.
        with (
            streaming(server, prompt="| 8 | Aaron") as one,
            streaming(server, prompt="Zoe, in") as two,
        ):
            waiting = pool.submit(server.post, COMPLETIONS, {**ENDLESS, "max_tokens": 2})
            server.wait_until(lambda: len(server.engine.scheduler.waiting) == 1)
            monkeypatch.setattr(llm.engine.model, "forward", fail)
            assert all(any("the engine failed" in line for line in s) for s in (one, two))
        assert waiting.result().status_code == 200
        failures = iter(range(2 * MAX_FAILED_STEPS))  # as many for each, and then no more
        for prompt in ("Nobody", "Somebody else"):
            failed = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
            assert_error(failed, 500, "the engine failed")
        server.assert_idle()


@contextmanager
def shutting_down(
    folder: Path, number: int, *flags: str, **more: Any
) -> Iterator[tuple[Forked, httpx.Client, Iterator[str]]]:
    """A server that has got a signal while a stream runs, a client that has connected before, and
    what is left of the stream."""
    with (
        forked(folder, "--kv-cache-memory-bytes", "32MiB", *flags) as (running, url),
        httpx.Client(base_url=url, verify=False, timeout=60) as client,
    ):
        client.get("/health")
        body = {**ENDLESS, "stream": True, **more}
        with http.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(number)
            yield running, client, lines


def test_sigterm_lets_requests_end_and_refuses_new_ones(tmp_path: Path):
    with shutting_down(tmp_path, signal.SIGTERM, max_tokens=400) as (running, client, lines):
        end = time.monotonic() + 10
        while (health := client.get("/health")).status_code == 200:
            assert time.monotonic() < end
        assert_error(health, 503, "shutting down")
        refused = client.post(COMPLETIONS, json={"prompt": "x"})
        assert_error(refused, 503, "shutting down")
        assert refused.headers["retry-after"] == "1"
        events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert events[-1] == "data: [DONE]"
        assert running.wait(15) in (0, -signal.SIGTERM)


def test_what_is_not_finished_in_time_ends_with_an_error(tmp_path: Path):
    flags = ("--shutdown-timeout", "0.3")
    with shutting_down(tmp_path, signal.SIGTERM, *flags) as (running, _, lines):
        events = [line for line in lines if line]
        assert "shutting down" in json.loads(events[-2][6:])["error"]["message"]
        assert running.wait(15) in (0, -signal.SIGTERM)


def test_a_second_signal_kills(tmp_path: Path):
    with shutting_down(tmp_path, signal.SIGINT) as (running, client, _):
        while client.get("/health").status_code == 200:
            pass
        start = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == -signal.SIGTERM
        assert time.monotonic() - start < 5


def test_a_missing_package_is_one_sentence(capsys: Any, monkeypatch: Any):
    for name in [*sys.modules]:
        if name.startswith(("radixcache.runtime.server.http", "uvicorn")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "radixcache: error: radixcache serve needs uvicorn: pip install '.[server]' in a checkout\n"
    )


def test_the_vocabulary_is_read_for_grammars_before_a_server_serves() -> None:
    """Reading it keeps all threads waiting, so that streams would stand still."""
    with LLM(kv_cache_memory_bytes="16MiB") as llm:
        assert llm.grammar_backend._vocabulary is None

        async def begin() -> None:
            async with (app := create_app(llm)).router.lifespan_context(app):
                assert llm.grammar_backend._vocabulary is not None

        asyncio.run(begin())
