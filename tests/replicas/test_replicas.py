"""`radixcache serve --replicas 3`: what one server does, and what only several must."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx2 as httpx
import pytest
from openai import APIConnectionError

from radixcache import LLM, SamplingParams
from tests.replicas.conftest import Deployment
from tests.replicas.load import CHATS, TURNS, Load, strike_busiest

pytest.importorskip("ray")

REPLICA = "x-radixcache-replica"
GREEDY = SamplingParams(max_tokens=40, temperature=0)


@pytest.fixture(scope="session")
def alone() -> LLM:
    """The same model in this process: what every answer must be."""
    return LLM(kv_cache_memory_bytes="256MiB")


def _chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def _flush(deployment: Deployment) -> None:
    answer = deployment.http.post("/v1/cache/flush")
    assert answer.status_code == 200, answer.text


def _wait_until_idle(deployment: Deployment) -> None:
    end = time.monotonic() + 10
    names = ("radixcache_requests_running", "radixcache_router_requests")
    while any(sum(deployment.metric(name).values()) for name in names):
        assert time.monotonic() < end, "something still runs"
        time.sleep(0.05)


def test_prompts_with_one_stem_go_to_one_replica_and_it_says_why(deployment: Deployment):
    _flush(deployment)
    stem = "A stem of many words that is the same in all of these prompts, and long enough. " * 4
    answers = [
        deployment.http.post("/v1/chat/completions", json=_chat(f"{stem}{n}?")) for n in "abcd"
    ]
    assert len({answer.headers[REPLICA] for answer in answers}) == 1
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0 and min(cached[1:]) > 60
    last = deployment.http.get("/v1/replicas").json()["recent"][0]
    chosen = {s["replica"]: s for s in last["standings"]}
    assert last["replica"] == answers[-1].headers[REPLICA] and len(chosen) == 3
    assert chosen[last["replica"]]["cached_tokens"] == cached[-1]
    assert chosen[last["replica"]]["cost"] == min(s["cost"] for s in chosen.values())


def test_who_hangs_up_leaves_nothing_running(deployment: Deployment):
    body = _chat("Tell me a long story.", max_tokens=3000, ignore_eos=True, stream=True)
    with deployment.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    body["stream"] = False
    with pytest.raises(httpx.TimeoutException):
        deployment.http.post("/v1/chat/completions", json=body, timeout=0.3)
    _wait_until_idle(deployment)


def test_a_replica_that_dies_costs_only_what_had_begun(deployment: Deployment, alone: LLM):
    prefix = {"name": "kept", "prompt": "A prefix that whoever joins must know. " * 5}
    assert deployment.http.post("/v1/prefixes", json=prefix).status_code == 200
    load = Load(deployment.client(), seed=1)
    before = deployment.replicas()

    killed = strike_busiest(deployment, load, lambda one: os.kill(one["pid"], signal.SIGKILL))
    for error, text in load.failed:
        assert text, f"nothing had come, and it failed: {error}"
        assert not isinstance(error, APIConnectionError), "it ended without an event"
    assert len(load.answered) + len(load.failed) == CHATS * TURNS
    for messages, text in load.answered:
        assert text == alone.chat(messages, GREEDY)[0].outputs[0].text
    (joined,) = deployment.wait_for(3).keys() - before.keys()
    assert killed["replica"] not in deployment.replicas()
    pinned = deployment.metric("radixcache_pages", ',state="pinned"')
    assert pinned[joined] == max(pinned.values()) > 0
    assert deployment.http.delete("/v1/prefixes/kept").status_code == 200
