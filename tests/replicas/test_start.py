"""Starts of `serve --replicas` that come to nothing: one sentence, and nothing is left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from tests.replicas.conftest import environment, free_port

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


def test_a_model_that_does_not_load(tmp_path: Path):
    model, mark = tmp_path / "model", uuid4().hex
    shutil.copytree(BUNDLED_MODEL, model)
    (model / "model.safetensors").write_bytes(b"nothing of the kind")
    process = _start(mark, str(model))
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2, told
    (sentence,) = [line for line in told.splitlines() if line.startswith("radixcache: error: ")]
    assert f"no replica starts: the model at {model} does not load" in sentence
    assert "Traceback" not in told
    _wait_until_gone(mark)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster(address: str):
    process = _start(uuid4().hex, RAY_ADDRESS=address)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert told.startswith("radixcache: error: RAY_ADDRESS must be HOST:PORT") and address in told


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
