"""The scripts for a GPU machine without network: what is packed, unpacked and started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from release import pack_flashinfer

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_unpacks_mends_links_and_starts_the_tests(tmp_path) -> None:
    checkout, parts = tmp_path / "checkout", tmp_path / "parts"
    for folder in (
        "radixcache", "bench", "kernels", "runtime", "release", "../parts", "../bin",
    ):  # fmt: skip
        (checkout / folder).mkdir(parents=True)
    (checkout / "radixcache/kernels").write_text("../kernels")
    script = checkout / "release/gpu_session.sh"
    script.write_bytes((ROOT / "release/gpu_session.sh").read_bytes())
    (parts / "env.sh").write_text("export PYTHONPATH=$kept/site\n")
    with tarfile.open(parts / "flashinfer.tgz", "w:gz") as tar:
        tar.add(parts / "env.sh", "env.sh")
    with zipfile.ZipFile(parts / "sortedcontainers-2.whl", "w") as wheel:
        wheel.writestr("sortedcontainers/compiled.so", "ELF")
    python = tmp_path / "bin/python3"
    python.write_text(
        f'#!/bin/sh\n[ "$2" != zipfile ] || exec {sys.executable} "$@"\n'
        'echo "$@"; echo "PYTHONPATH=$PYTHONPATH"; pwd; touch "${7#--junitxml=}"; exit 1\n'
    )
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    words = ["bash", script, parts, tmp_path / "out"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "what the tests have said is lost"
    called, path, folder = done.stdout.splitlines()
    kept = tmp_path / "radixcache-gpu"
    assert called.startswith("-m pytest ") and called.endswith(" -m gpu tests/gpu")
    assert path == f"PYTHONPATH={kept / 'site'}:{kept / 'wheels'}"
    assert (kept / "wheels/sortedcontainers/compiled.so").is_file()
    assert Path(folder) == checkout
    with tarfile.open(tmp_path / "out/results.tgz") as results:
        assert {"./session.log", "./rows.xml"} <= {*results.getnames()}
    for name in ("bench", "kernels", "runtime"):
        assert (checkout / "radixcache" / name).resolve() == checkout / name


def test_the_archive_holds_kernels_and_what_loads_them(tmp_path, monkeypatch, capsys) -> None:
    def write(path: str, text: str = "") -> None:
        file = tmp_path / "build" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    package = "sources/flashinfer"
    for name in ["__init__", *pack_flashinfer.PARTS.split(), "of_no_use"]:
        write(f"{package}/{name}.py")
    sources = ("csrc/page.cu", "csrc/nv_internal/utils.h", "include/page.cuh", "cccl/cub/cub.cuh")
    for path in (*sources, "csrc/fmha/gemm.cu", "cutlass/test/gemm.cu"):
        write(f"{package}/data/{path}")
    write("site-3.12/tvm_ffi/__init__.py")
    write("aot/9.0a/page/page.so", "ELF")
    write("stub/libcuda.so", "ELF")
    write("headers/nvidia/cu13/include/curand.h")
    archive = tmp_path / "flashinfer.tgz"
    pack_flashinfer.write(tmp_path / "build", archive, ["page"], "9.0a", "3.12")
    with tarfile.open(archive) as tar:
        held = {name for name in tar.getnames() if Path(name).suffix}
    inside = "site/flashinfer"
    assert held == {
        "env.sh", "stub/libcuda.so", "headers/curand.h", "site/tvm_ffi/__init__.py",
        *(f"{inside}/data/{path}" for path in (*sources, "aot/page/page.so")),
        *(f"{inside}/{name}.py" for name in ["__init__", *pack_flashinfer.PARTS.split()]),
    }  # fmt: skip
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert pack_flashinfer.main([str(tmp_path / "a.tgz")]) == 2
    assert "nvcc is not there" in capsys.readouterr().err


def test_what_the_archive_lacks_is_built_where_nvcc_is(tmp_path) -> None:
    (tmp_path / "env.sh").write_text(pack_flashinfer.ENV % "9.0a")
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    words = ["/bin/bash", "-c", "source env.sh; echo ${FLASHINFER_DISABLE_JIT-builds}"]

    def said() -> str:
        env = {"PATH": str(tmp_path)}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    assert said() == "1\n"
    (tmp_path / "nvcc").touch(0o755)
    assert said() == "builds\n"
