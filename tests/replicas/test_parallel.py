"""`radixcache serve --replicas 2 --tensor-parallel-size 2`, on CPUs."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixcache import LLM, SamplingParams
from tests.replicas.conftest import Deployment, deployed

pytest.importorskip("ray")
pytest.importorskip("accelerate")  # transformers cuts models with it


def test_each_replica_is_several_processes_and_answers_as_one_does():
    prompts = [f"{number} times a quick brown fox jumps. " * 3 for number in range(8)]

    def ask(deployment: Deployment, prompt: str) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        answer = deployment.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-radixcache-replica"], answer.json()["choices"][0]["text"]

    with (
        deployed("--replicas", "2", "--tensor-parallel-size", "2") as (deployment, process),
        ThreadPoolExecutor(8) as threads,
    ):
        found = [*threads.map(lambda prompt: ask(deployment, prompt), prompts)]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    alone = LLM(kv_cache_memory_bytes="64MiB")
    params = SamplingParams(max_tokens=16, temperature=0)
    expected = [output.outputs[0].text for output in alone.generate(prompts, params)]
    assert [text for _, text in found] == expected
    assert len({replica for replica, _ in found}) == 2
