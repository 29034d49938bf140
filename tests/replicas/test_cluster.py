"""The application of `docs/deploy/serve_config.yaml`, with the bundled model, on two nodes that the
replicas fill: there is room for the ingress on the head only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from radixcache.errors import InvalidRequest
from tests.replicas.conftest import KV_TOKENS, environment, free_port
from tests.replicas.nodes import alive

pytest.importorskip("ray")

CONFIG = Path("docs/deploy/serve_config.yaml")

SCRIPT = """
import sys, ray, yaml, httpx2 as httpx
from ray import serve
from radixcache.runtime.router.cluster import build

ray.init()
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(build(yaml.safe_load(sys.argv[2])), name="ours", route_prefix="/")
url = f"http://127.0.0.1:{sys.argv[1]}"
names = set()
for turn in range(3):
    body = {"prompt": "the same words again and again " * 9, "max_tokens": 2, "stream": turn == 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    names.add(answer.headers["x-radixcache-replica"])
assert answer.text.endswith("data: [DONE]\\n\\n"), answer.text
assert len(names) == 1 and len(httpx.get(f"{url}/v1/replicas").json()["replicas"]) == 2
print("served")
serve.delete("ours")
"""


def test_it_serves_behind_serves_proxy():
    import ray  # noqa: F401 (or there is nothing to try)

    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    assert application["import_path"] == "radixcache.runtime.router.cluster:build"
    args = {name: application["args"][name] for name in ("kv-cache-memory-bytes", "replicas")}
    args |= {"kv-cache-memory-bytes": KV_TOKENS * 4096, "replicas": 2, "device": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(free_port()), yaml.safe_dump(args)]
    with alive(2) as nodes:
        env = {**environment(), "RAY_ADDRESS": nodes.address}
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "served" in run.stdout, run.stderr[-3000:]


def test_what_makes_no_sense_is_refused_in_one_sentence():
    from radixcache.runtime.router.cluster import build

    with pytest.raises(InvalidRequest, match="port is not for"):
        build({"port": 1})
    with pytest.raises(InvalidRequest, match="like 2"):
        build({"replicas": "0"})
