"""The GPU check, rehearsed on a simulated GPU: every line of it runs, and it can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache import RadixCache
from radixcache.bench.gpu import check, equality
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report, Row, failed, figure, table
from release import pack_flashinfer
from tests.bench.gpu.rehearsal import SMALL, rehearsal_place

ROOT = Path(__file__).resolve().parents[3]
Found = dict[str, dict[str, Row]]
"""Rows by section and name."""


def run(folder: Path, *sections: str, prepare: Callable[[Place], Any] | None = None) -> Found:
    """Sections in this process, on the simulated GPU."""
    found: Found = {}
    with rehearsal_place(folder) as place:
        if prepare is not None:
            prepare(place)
        for section in sections:
            report = Report(section, folder / f"{section}.jsonl", 600)
            check.run_section(section, place, report)
            found[section] = {row.name: row for row in report.rows}
    return found


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> Found:
    return run(tmp_path_factory.mktemp("rehearsal"), *check.SECTIONS)


def test_a_rehearsal_goes_through_every_section_and_finds_nothing_wrong(rehearsed) -> None:
    rows = [row for section in rehearsed.values() for row in section.values()]
    assert set(rehearsed) == set(check.SECTIONS) and all(rehearsed.values())
    assert [str(row) for row in rows if row.status in ("FAIL", "not run")] == []


def test_every_path_and_every_kind_of_layer_is_tried(rehearsed) -> None:
    for path in ("decode", "suffix", "fresh", "mixed", "cascade", "cascade, mixed"):
        for shape in product((1, 16), SMALL.head_dims, (1, 4, 8)):
            row = "{}: page {}, head_dim {}, GQA {}".format(path, *shape)
            assert row in rehearsed["correctness"]


def test_other_tokens_than_transformers_fail_the_check(tmp_path, monkeypatch) -> None:
    generated = vars(equality)["generated"]
    monkeypatch.setattr(equality, "CACHES", {"radix": (RadixCache, 16)})
    monkeypatch.setattr(
        equality, "generated", lambda requests: [[*a[:-1], 5] for a in generated(requests)]
    )
    row = run(tmp_path, "equality")["equality"]["radix = plain transformers"]
    assert row.status == "FAIL" and "below the best one's" in row.text


def test_without_flashinfer_the_torch_backend_is_measured(tmp_path, monkeypatch) -> None:
    def leave_out(place: Place) -> None:
        place.with_flashinfer = False
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # until the rehearsal ends
        sys.modules["radixcache.kernels.flashinfer_backend"] = None  # type: ignore[assignment]

    monkeypatch.setattr(equality, "CACHES", {"radix": (RadixCache, 16)})
    found = run(tmp_path, "environment", "layers", "equality", "speed", prepare=leave_out)
    rows = [row for section in found.values() for row in section.values()]
    assert [str(row) for row in rows if row.status == "FAIL"] == []
    assert found["environment"]["FlashInfer runs"].status == "not run"
    smoke = found["layers"].values()
    assert {row.status for row in smoke} == {"not run"} and len(smoke) > 10
    assert found["equality"]["radix = plain transformers"].status == "ok"
    name = f"decode, batch 1 x {SMALL.decode_context}, page 16"
    assert found["speed"][name].status in ("met", "missed")


def test_why_flashinfer_does_not_run_is_told_in_full(tmp_path, monkeypatch) -> None:
    def breaks(*_: object) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    def break_backend(place: Place) -> None:
        backend = sys.modules["radixcache.kernels.flashinfer_backend"]
        monkeypatch.setattr(backend, "FlashInferBackend", breaks)

    row = run(tmp_path, "environment", prepare=break_backend)["environment"]["FlashInfer runs"]
    assert row.status == "FAIL" and "libcudart.so.13" in row.text
    assert "Traceback" in row.lines[0] and any("in breaks" in line for line in row.lines)


# The report.


def raises(error: BaseException):
    def work():
        raise error

    return work


def test_checks_stand_alone(tmp_path) -> None:
    class MissingJITCacheError(Exception):
        pass

    report = Report("first", tmp_path / "first.jsonl", 60)
    report.check("missing", raises(MissingJITCacheError("kernel")))
    report.check("impossible", raises(NotRun("not here")))
    assert failed(report.rows)  # nothing ran
    report.check("right", lambda: "well")
    assert not failed(report.rows)
    report.check("wrong", raises(ValueError("so it is\nand more")))
    report.measure("figures", lambda: [figure("a", 1.0, "x", at_most=2), figure("b", 1, "x")])
    report.measure("slow", lambda: [figure("c", 3.0, "x", at_most=2, lines=["why"])])
    report.measure("small", lambda: [figure("d", 3.0, "x", at_least=4)])
    late = Report("late", tmp_path / "first.jsonl", -1)
    late.check("never", raises(AssertionError("it ran")))
    assert [(row.name, row.status) for row in report.rows + late.rows] == [
        ("missing", "not run"),
        ("impossible", "not run"),
        ("right", "ok"),
        ("wrong", "FAIL"),
        ("a", "met"),
        ("b", "measured"),
        ("c", "missed"),
        ("d", "missed"),
        ("never", "not run"),
    ]
    assert report.rows[3].text == "ValueError: so it is" and report.rows[6].lines == ["why"]
    assert "| first | c | missed | ≤ 2 | 3 x |" in table(report.rows)


def test_a_section_ends_where_its_process_has_lost_the_device(tmp_path, monkeypatch) -> None:
    report = Report("first", tmp_path / "first.jsonl", 60)
    lost = raises(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        report.check("reads page -1", lost)
    assert [row.status for row in report.rows] == ["FAIL"]


# Processes.


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Runs sections that are a line of Python each; gives the exit code and the rows."""

    def run(*options: str, **sections: str) -> tuple[int, list[tuple[str, str, str]]]:
        started = {"environment": "row('FlashInfer runs', 'ok')", **sections}
        monkeypatch.setattr(check, "SECTIONS", dict.fromkeys(started, (1, 2)))
        monkeypatch.setattr(check, "_GRACE", 0.2)

        def command(name: str, options: list[str]) -> list[str]:
            prelude = f"""
import json, os, signal, sys, time
def row(name, status):
    row = dict(section={name!r}, name=name, status=status, text=' '.join({options!r}))
    with open({str(tmp_path / name)!r} + '.jsonl', 'a') as file:
        file.write(json.dumps(row) + chr(10))
"""
            return [sys.executable, "-S", "-c", prelude + started[name]]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(check, "command_of", command)
        code = check.main(["--out", str(tmp_path), *options])
        rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
        return code, [(row["section"], row["status"], row["text"]) for row in rows]

    return run


def test_no_section_ends_the_others_and_each_is_reported(fakes, tmp_path) -> None:
    ok, child = "row('works', 'ok')", tmp_path / "pid"
    start = f"open({str(child)!r}, 'w').write(str(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '60')))"
    half = f"open({str(tmp_path / 'half.jsonl')!r}, 'ab').write(bytes([123, 34, 0xE2]))"
    code, rows = fakes(
        hangs=f"{ok}; {start}; time.sleep(60)",
        crashes=f"{ok}; os.kill(os.getpid(), signal.SIGSEGV)",
        raises="raise RuntimeError('CUDA error: an illegal memory access was encountered')",
        half=f"{ok}; {half}; os.abort()",
        goes_on=ok,
    )
    assert code == 1
    assert [row[:2] for row in rows] == [
        ("environment", "ok"),
        ("hangs", "ok"),
        ("hangs", "FAIL"),
        ("crashes", "ok"),
        ("crashes", "FAIL"),
        ("raises", "FAIL"),
        ("half", "ok"),
        ("half", "FAIL"),
        ("goes_on", "ok"),
    ]
    assert [text for _, status, text in rows if status == "FAIL"] == [
        "took longer than its 2 s",
        "killed by signal 11",
        "exit status 1",
        "killed by signal 6",
    ]
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_where_flashinfer_does_not_run_the_others_do_without(fakes) -> None:
    for environment in ("row('FlashInfer runs', 'FAIL')", "os.abort()"):
        _, rows = fakes(environment=environment, next="row('works', 'ok')")
        assert "--torch" not in rows[0][2] and "--torch" in rows[-1][2]
    _, rows = fakes(next="row('works', 'ok')")
    assert "--torch" not in rows[-1][2]


def test_a_machine_without_a_gpu_is_told_so_in_one_sentence(tmp_path, capfd) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert check.main(["--out", str(tmp_path)]) == check.CANNOT_RUN
    assert "cannot run here: no CUDA device is visible" in capfd.readouterr().err


def test_a_section_runs_by_its_name_in_this_process(tmp_path) -> None:
    assert check.main(["--rehearse", "--section", "environment", "--out", str(tmp_path)]) == 0
    assert "FlashInfer runs" in (tmp_path / "environment.jsonl").read_text()


# A machine without network.


def test_the_script_unpacks_mends_links_and_starts_the_check(tmp_path) -> None:
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
        'echo "$@"; echo "PYTHONPATH=$PYTHONPATH"; pwd; touch "$4/speed.jsonl"; exit 1\n'
    )
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    words = ["bash", script, parts, tmp_path / "out", "2", "--only", "llm"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "what the check has said is lost"
    called, path, folder = done.stdout.splitlines()
    kept = tmp_path / "radixcache-gpu"
    assert re.fullmatch(r"-m radixcache.bench.gpu.check --out \S+ --call 2 --only llm", called)
    assert path == f"PYTHONPATH={kept / 'site'}:{kept / 'wheels'}"
    assert (kept / "wheels/sortedcontainers/compiled.so").is_file()
    assert Path(folder) == checkout
    with tarfile.open(tmp_path / "out/results-2.tgz") as results:
        assert {"./session.log", "./speed.jsonl"} <= {*results.getnames()}
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
