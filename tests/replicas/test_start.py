"""Starts of `serve --replicas` that come to nothing: one sentence, and nothing is left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock
from uuid import uuid4

import pytest

from radixcache.errors import ModelError
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.listener import listen
from tests.replicas.conftest import deployed, environment, free_port
from tests.replicas.nodes import alive

pytest.importorskip("ray")


def _start(mark: str, *flags: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "radixcache", "serve", "--replicas", "2", *flags]
    command += ["--port", str(free_port()), "--kv-cache-memory-bytes", "8MiB"]
    env = {**environment(), **more, "STARTED_BY": mark}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def _left_over(mark: str) -> list[str]:
    """The command lines of what was started with this mark, by whatever process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def _wait_until_gone(mark: str) -> None:
    end = time.monotonic() + 90  # agents of Ray's look every now and then whether it is there
    while left := _left_over(mark):
        assert time.monotonic() < end, left
        time.sleep(0.5)


@pytest.mark.parametrize("what", ["model", "kv_dir"])
def test_what_no_replica_can_read(what: str, tmp_path: Path):
    model, mark = tmp_path / "model", uuid4().hex
    shutil.copytree(BUNDLED_MODEL, model)
    (model / "model.safetensors").write_bytes(b"nothing of the kind")
    process = _start(mark, *((str(model),) if what == "model" else ("--kv-dir", __file__)))
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2, told
    (sentence,) = [line for line in told.splitlines() if line.startswith("radixcache: error: ")]
    reason = f"the model at {model} does not load"
    if what == "kv_dir":
        reason = f"kv_dir {__file__} cannot be used"
    assert f"no replica starts: {reason}" in sentence
    assert "Traceback" not in told
    _wait_until_gone(mark)


@pytest.mark.parametrize("deaths", [2, 3])
def test_replicas_that_die_while_they_start_are_started_again(
    deaths: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Their node may have died; and what is left of an earlier start is deleted before."""
    from radixcache.runtime.router import deploy

    runs = Mock()
    runs.run.side_effect = [RuntimeError()] * deaths + ["handle"]
    failed = SimpleNamespace(message="Error:\nActorUnavailableError('RPC error: closed')")
    status = SimpleNamespace(applications={"x": SimpleNamespace(deployments={"replica": failed})})
    runs.status.return_value = status
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(deploy, "serve", runs)
    monkeypatch.setattr(deploy, "ray", Mock(**{"nodes.return_value": []}))
    monkeypatch.setattr(deploy, "bind", Mock())
    caplog.set_level("WARNING", "radixcache")
    given = EngineArgs(), ServerArgs(), b"", "x"
    if deaths == 3:
        with pytest.raises(ModelError, match="each dies while it starts"), deploy.deployed(*given):
            pass
    else:
        with deploy.deployed(*given) as handle:
            assert str(handle) == "handle"
    called = [name for name, *_ in runs.mock_calls if name in ("run", "delete")]
    assert called == ["delete", "run"] * 3 + ["delete"]
    assert "room for 0 of 1 replicas, each with 1 core: waiting" in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster(address: str):
    process = _start(uuid4().hex, RAY_ADDRESS=address)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert told.startswith("radixcache: error: RAY_ADDRESS must be HOST:PORT") and address in told


def test_a_cluster_of_this_machine_is_joined_by_its_address_only():
    with alive(1), deployed("--replicas", "1") as (found, process):
        assert found.http.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_something_else_listens(says: bytes):
    with listen("127.0.0.1", 0) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].sendall(says)

        Thread(target=accept, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        process = _start(uuid4().hex, RAY_ADDRESS=address)
        _, told = process.communicate(timeout=60)  # alone, Ray tries for four minutes
    assert process.returncode == 2
    assert f"radixcache: error: the Ray cluster at {address} cannot be joined" in told


@pytest.mark.parametrize("seconds", [6.0, 12.0])
def test_a_signal_while_it_starts(seconds: float):
    mark = uuid4().hex
    process = _start(mark)
    time.sleep(seconds)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    # By the signal, or Ray's handler with its number; or Ray aborts, if that interrupts its start.
    assert process.returncode in (-signal.SIGTERM, signal.SIGTERM, -signal.SIGABRT)
    _wait_until_gone(mark)
