"""Streams of an engine that runs several steps in one call: whole, and cut where they stop."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as http
import pytest

from radixcache import LLM
from radixcache.runtime.engine import multi_step_runner
from tests.helpers.native import needs_kernels
from tests.runtime.server.live import LiveServer, live

CHAT = "/v1/chat/completions"


def streamed(server: LiveServer, body: dict[str, Any]) -> tuple[str, int, Any]:
    """The text of a stream, its number of pieces, and its usage."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", server.url + CHAT, json=asked, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    pieces = [c["delta"].get("content") for chunk in chunks for c in chunk["choices"]]
    return "".join(p or "" for p in pieces), sum(map(bool, pieces)), chunks[-1]["usage"]


@needs_kernels
def test_a_stream_is_what_single_steps_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_step_runner, "CALL_SECONDS", 1.0)
    message = {"role": "user", "content": "How old is Clara Frost?"}
    kinds: list[dict[str, Any]] = [
        {},
        {"stop": ["a", "5"]},
        {"temperature": 1.3, "seed": 3, "n": 1},
    ]
    with LLM(kv_cache_memory_bytes="4MiB") as llm, live(llm) as server:
        found = []
        for _ in range(2):
            for kind in kinds:
                body = {"messages": [message], "temperature": 0, "max_tokens": 40, **kind}
                whole = server.post(CHAT, body).json()
                text, pieces, usage = streamed(server, body)
                assert text == whole["choices"][0]["message"]["content"]
                assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
                found.append((text, usage["completion_tokens"], pieces))
            llm.engine.multi_step = None
    several, one = found[: len(kinds)], found[len(kinds) :]
    assert [row[:2] for row in several] == [row[:2] for row in one]
    assert sum(row[2] for row in several) < sum(row[2] for row in one)
