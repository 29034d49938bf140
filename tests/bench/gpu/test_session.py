"""The script for a borrowed machine."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("lost", ["left out", "made files"])
def test_it_unpacks_mends_links_and_starts_the_check(tmp_path, lost) -> None:
    checkout, parts = tmp_path / "checkout", tmp_path / "parts"
    for folder in ("radixcache", "bench", "kernels", "runtime", "../parts", "../bin"):
        (checkout / folder).mkdir(parents=True)
    if lost == "made files":
        for name in ("kernels", "runtime"):
            (checkout / "radixcache" / name).write_text(f"../{name}")
    script = checkout / "bench/gpu_session.sh"
    script.write_bytes((ROOT / "bench/gpu_session.sh").read_bytes())
    (parts / "env.sh").write_text("export PYTHONPATH=$kept/site\n")
    with tarfile.open(parts / "flashinfer.tgz", "w:gz") as tar:
        tar.add(parts / "env.sh", "env.sh")
    (parts / "sortedcontainers-2.whl").touch()
    python = tmp_path / "bin/python3"
    python.write_text('#!/bin/sh\necho "$@"; echo "PYTHONPATH=$PYTHONPATH"; pwd\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", script, parts, tmp_path / "out", "2", "--only", "reuse"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    called, path, folder = done.stdout.splitlines()
    kept = tmp_path / "radixcache-gpu"
    assert called == (
        f"-m radixcache.bench.gpu.check --out {tmp_path / 'out'} --call 2 "
        f"--ceilings {kept / 'ceilings.json'} --only reuse"
    )
    assert path == f"PYTHONPATH={kept / 'site'}:{parts / 'sortedcontainers-2.whl'}"
    assert Path(folder) == checkout
    assert (tmp_path / "out/session2.log").read_text() == done.stdout
    for name in ("bench", "kernels", "runtime"):
        assert (checkout / "radixcache" / name).resolve() == checkout / name


def test_it_says_what_it_needs(tmp_path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "bench/gpu_session.sh", tmp_path], capture_output=True, text=True
    )
    assert done.returncode != 0 and "folder for the results" in done.stderr
