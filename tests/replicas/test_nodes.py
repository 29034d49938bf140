"""`radixcache serve --replicas 3` on three nodes: which have one each, die, freeze and come."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from radixcache import LLM, SamplingParams
from radixcache.errors import InvalidRequest
from tests.replicas.conftest import Deployment
from tests.replicas.load import CHATS, TURNS, Load, strike_busiest
from tests.replicas.nodes import Nodes, cluster, node_of

pytest.importorskip("ray")

REPLICA = "x-radixcache-replica"
GREEDY = SamplingParams(max_tokens=40, temperature=0)
Cluster = tuple[Nodes, Deployment]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = os.path.relpath(tmp_path_factory.mktemp("kv"))
    with cluster(3, "--kv-dir", folder, "--kv-dir-size", "64MiB") as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """The same model in this process: what every answer must be."""
    with LLM(kv_cache_memory_bytes="256MiB") as llm:
        yield llm


class Asker:
    """Asks for completions, and compares them with those of one server."""

    def __init__(self, deployment: Deployment, alone: LLM) -> None:
        self._http, self._alone = deployment.http, alone

    def ask(self, prompt: str) -> tuple[str, int]:
        """The replica that has answered, and how many tokens it had cached."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = self._http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found, params = answer.json(), SamplingParams(max_tokens=8, temperature=0)
        expected = self._alone.generate([prompt], params)[0].outputs[0].text
        assert found["choices"][0]["text"] == expected
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers[REPLICA], cached


def _stem(number: int, length: int = 20) -> str:
    return f"{number * 7919} people live where I come from, they say. " * length


def _nodes(deployment: Deployment) -> dict[str, int]:
    return {name: node_of(replica) for name, replica in deployment.replicas().items()}


def test_prompts_spread_over_the_nodes_and_return_to_where_their_stems_are(
    three: Cluster, alone: LLM
):
    nodes, deployment = three
    assert sorted(_nodes(deployment).values()) == sorted(nodes.names)
    asker = Asker(deployment, alone)
    first = [asker.ask(_stem(number)) for number in range(6)]
    assert max(cached for _, cached in first) < 8 and len({name for name, _ in first}) == 3
    again = [asker.ask(f"{_stem(number)} And you?") for number in range(6)]
    assert [name for name, _ in again] == [name for name, _ in first]
    assert min(cached for _, cached in again) > 200


def test_who_replaces_a_replica_finds_its_folder_and_gets_its_prompts(three: Cluster, alone: LLM):
    _, deployment = three
    asker = Asker(deployment, alone)
    name, _ = asker.ask(_stem(0))
    dying = deployment.replicas()[name]
    for number in range(100, 100 + 16):  # until no memory has it any more
        asker.ask(_stem(number, 80))
    node = node_of(dying)
    os.kill(dying["pid"], signal.SIGKILL)
    end = time.monotonic() + 60
    while dying["replica"] in (found := deployment.replicas()) or len(found) != 3:
        assert time.monotonic() < end
        time.sleep(0.1)
    (new,) = [replica for replica in found.values() if node_of(replica) == node]
    assert new["kv_dir"] == dying["kv_dir"] and Path(new["kv_dir"]).is_dir()
    name, cached = asker.ask(f"{_stem(0)} And you?")
    assert name == new["replica"] and cached > 200


def _check(load: Load, alone: LLM) -> None:
    """All streams have ended; only what had begun was cut off; the others are right."""
    assert not load.unended and all(text for _, text in load.failed)
    assert len(load.answered) + len(load.failed) == CHATS * TURNS
    for messages, text in load.answered:
        assert text == alone.chat(messages, GREEDY)[0].outputs[0].text


def test_a_node_that_dies_takes_only_what_had_begun_and_one_that_comes_gets_its_share(
    three: Cluster, alone: LLM
):
    nodes, deployment = three
    load, before = Load(deployment.client(), seed=2), deployment.replicas()
    strike_busiest(deployment, load, lambda replica: nodes.kill(node_of(replica)))
    _check(load, alone)
    deployment.wait_for(2)
    came = nodes.add()
    (joined,) = deployment.wait_for(3).keys() - before.keys()
    assert _nodes(deployment)[joined] == came
    load = Load(deployment.client(), seed=3)
    asyncio.run(load.run())
    assert len(load.answered) == CHATS * TURNS and load.cached_tokens > load.prompt_tokens / 2
    assert deployment.metric("radixcache_hit_tokens_total")[joined] > 1000


def test_the_streams_of_a_replica_that_hangs_end(three: Cluster, alone: LLM):
    """Long before Ray gives it up; and it joins again when it goes on."""
    _, deployment = three
    load, stopped = Load(deployment.client(), seed=4), []

    def stop(replica: Any) -> None:
        os.kill(replica["pid"], signal.SIGSTOP)
        stopped.append(replica)

    strike_busiest(deployment, load, stop)
    os.kill(stopped[0]["pid"], signal.SIGCONT)
    _check(load, alone)
    deployment.wait_for(3)


def test_a_silent_replica_may_be_asked_for_its_queue_for_a_while_only():
    from ray.serve.request_router import PendingRequest

    from radixcache.runtime.router.sender import PATIENCE, Sender

    replicas: list[Any] = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"
    ]

    async def ranks(name: str, age: float) -> list[str]:
        request: Any = PendingRequest([name], {}, None, time.time() - age, None)
        sender = Sender.__new__(Sender)
        found = await sender.choose_replicas(replicas, request)
        return ["".join(r.replica_id.unique_id for r in rank) for rank in found]

    assert asyncio.run(ranks("b", 0)) == ["b"]
    assert asyncio.run(ranks("b", PATIENCE + 0.1)) == ["b", "ac"]
    assert asyncio.run(ranks("gone", 0)) == ["", "abc"]


def test_a_replica_has_as_many_cores_as_all_find_on_the_nodes():
    from radixcache.runtime.router.deploy import cores_each, room

    unequal = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}, {}]
    assert [cores_each(n, unequal) for n in (1, 2, 3, 5, 6, 10, 20, 30)] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert cores_each(2, []) == 1
    assert room(unequal, {"num_cpus": 4, "num_gpus": 0}) == 5
    assert room(unequal, {"num_cpus": 1, "num_gpus": 2}) == 2


def test_a_cluster_that_lets_nobody_in_is_told_of_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    from radixcache.runtime.router import deploy

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr("ray.init", Mock(side_effect=ConnectionError("no token. See docs")))
    with pytest.raises(InvalidRequest, match="cannot be joined: no token"):
        deploy._join({})
