"""The GPU check, rehearsed on a pretended GPU: every line of it runs, and it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from types import ModuleType

import pytest
import torch

from radixcache.bench import gpu_check
from radixcache.bench.gpu import peers
from radixcache.bench.gpu import report as report_module
from radixcache.bench.gpu.models import random_llama
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import DeviceLost, Figure, NotRun, Report
from radixcache.bench.gpu.sizes import FULL, SMALL
from radixcache.runtime.engine import engine
from tests.models import continuous_batching

ROOT = Path(__file__).resolve().parents[2]


def rehearse(folder: Path, *arguments: str) -> tuple[int, dict]:
    path = folder / "found.json"
    code = gpu_check.main(["--rehearse", "--out", str(path), *arguments])
    return code, json.loads(path.read_text())


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[int, dict]:
    before = radixcache_parts()
    found = rehearse(tmp_path_factory.mktemp("rehearsal"))
    assert radixcache_parts() == before  # nothing stays replaced
    return found


def radixcache_parts() -> list[object]:
    return [vars(engine)["group_by_prefix"], sys.modules.get("flashinfer"), torch.cuda.Event]


def rows(found: dict, section: str) -> dict[str, dict]:
    return {row["name"]: row for row in found["rows"] if row["section"] == section}


def test_a_rehearsal_goes_through_every_section_and_finds_nothing_wrong(rehearsed) -> None:
    code, found = rehearsed
    wrong = [row for row in found["rows"] if row["status"] == "FAIL"]
    assert code == 0 and not wrong
    assert {row["section"] for row in found["rows"]} == set(gpu_check.SECTIONS)
    not_run = [row["name"] for row in found["rows"] if row["status"] == "not run"]
    assert set(not_run) <= {
        "fa3 for a fresh prompt",  # the stand-in has no such kernel
        "transformers' generate_batch",  # in a thread of its own, which pretends nothing
    }


def test_every_path_is_checked_at_every_shape(rehearsed) -> None:
    names = rows(rehearsed[1], "correctness")
    for path in ("decode", "suffix", "fresh", "mixed", "cascade", "cascade, mixed", "graphs"):
        for page_size in (1, 16):
            for dim in SMALL.head_dims:
                for group in (1, 4, 8):
                    row = f"{path}: page {page_size}, head_dim {dim}, GQA {group}"
                    assert names[row]["status"] == "ok"
    assert FULL.head_dims == (64, 128)
    assert sum(name.startswith("self-test") for name in names) == 5


def test_every_figure_of_the_plan_has_a_row(rehearsed) -> None:
    found = rehearsed[1]
    for batch in SMALL.decode_batches:
        name = f"decode, batch {batch} x {SMALL.decode_context}, page 16"
        assert {name, f"{name}: device alone", f"{name}: overhead of the engine"} <= set(
            rows(found, "decode")
        )
    for cached in SMALL.cached:
        name = f"TTFT of {SMALL.question} tokens on {cached} cached, page 16"
        assert {name, f"{name}: cold over cached"} <= set(rows(found, "ttft"))
    cascades = rows(found, "cascade")
    points = len(SMALL.rows) * len(SMALL.shared) * len(SMALL.heads) + 1  # one with page size 1
    assert sum("rows" in n and n.startswith("flat over") for n in cascades) == points
    assert sum(n.startswith("break-even") for n in cascades) == len(SMALL.heads)
    assert sum("flat over cascade, step" in n for n in cascades) == len(SMALL.shared_in_engine)
    caches = [name.partition(":")[0] for name in rows(found, "reuse")]
    assert caches[:4] == ["radix, page 16", "radix, page 1", "hash-block 16", "no cache"]
    questions = list(rows(found, "open_questions"))
    for start in ("suffix of", "decode, GQA 8", "2 decodes and a chunk", "fa3", "torch, prefill"):
        assert any(name.startswith(start) for name in questions), start
    missed = [row for row in found["rows"] if row["status"] == "missed"]
    assert missed and all(row["lines"] for row in missed)  # each says where its time goes


def test_the_same_requests_prefill_least_with_a_radix_tree(rehearsed) -> None:
    notes = {n.partition(":")[0]: r["text"] for n, r in rows(rehearsed[1], "reuse").items()}
    prefilled = {name: int(notes[name].split()[1]) for name in list(notes)[:4]}
    assert prefilled["radix, page 1"] <= prefilled["hash-block 16"] < prefilled["no cache"]
    assert prefilled["radix, page 16"] < prefilled["hash-block 16"]


@continuous_batching
def test_the_peer_answers() -> None:
    place = Place(torch.device("cpu"), torch.float32, ModuleType("none"), ModuleType("none"), SMALL)
    (figure,) = peers._peer(place, random_llama(place, SMALL.big))
    assert figure.value > 0


def test_wrong_pages_fail_the_check(tmp_path, capsys) -> None:
    code, found = rehearse(tmp_path, "--only", "correctness", "--plant")
    assert code == 1
    statuses = {name: row["status"] for name, row in rows(found, "correctness").items()}
    planted = {n: s for n, s in statuses.items() if "head_dim" in n and "fresh" not in n}
    assert set(planted.values()) == {"FAIL"}
    assert all(status == "ok" for name, status in statuses.items() if "self-test" in name)
    assert "FAIL" in capsys.readouterr().out


def test_other_tokens_than_transformers_fail_the_check(tmp_path) -> None:
    code, found = rehearse(tmp_path, "--only", "equality", "--plant")
    statuses = {name: row["status"] for name, row in rows(found, "equality").items()}
    assert code == 1 and statuses["radix, page 16 = plain transformers"] == "FAIL"


def test_a_machine_without_a_gpu_is_told_so_in_one_sentence(tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_checks_stand_alone(tmp_path) -> None:
    report = Report(tmp_path / "found.json", {}, 60)

    def raises(error: BaseException):
        def work():
            raise error

        return work

    class MissingJITCacheError(Exception):
        pass

    with report.section("first", 60):
        report.check("right", lambda: "well")
        report.check("wrong", raises(ValueError("so it is\nand more")))
        report.check("missing", raises(MissingJITCacheError("kernel")))
        report.check("impossible", raises(NotRun("not here")))
        report.measure("figures", lambda: [Figure("a", 1.0, "x", at_most=2), Figure("b", 1, "x")])
        report.measure("slow", lambda: Figure("c", 3.0, "x", at_most=2, explain=lambda: ["why"]))
        report.measure("small", lambda: Figure("d", 3.0, "x", at_least=4))
        raise RuntimeError("the section itself")
    with report.section("late", -1):
        report.check("never", raises(AssertionError("it ran")))
    statuses = [(row.name, row.status) for row in report.rows]
    assert statuses == [
        ("right", "ok"),
        ("wrong", "FAIL"),
        ("missing", "not run"),
        ("impossible", "not run"),
        ("a", "met"),
        ("b", "measured"),
        ("c", "missed"),
        ("d", "missed"),
        ("preparations", "FAIL"),
        ("never", "not run"),
    ]
    assert report.rows[1].text == "ValueError: so it is" and report.rows[6].lines == ["why"]
    assert report.failed and len(json.loads(report.path.read_text())["rows"]) == 10


def test_a_report_in_which_nothing_ran_is_a_failure(tmp_path) -> None:
    report = Report(tmp_path / "found.json", {}, 60)
    with report.section("first", 60):
        report.not_run("all", "no kernels")
    assert report.failed
    with report.section("second", 60):
        report.check("something", lambda: None)
    assert not report.failed


def test_a_check_that_takes_too_long_is_interrupted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report_module, "GRACE", 0.0)
    report = Report(tmp_path / "found.json", {}, 60)

    def endless() -> None:
        while True:
            pass

    with report.section("first", 0.05):
        report.check("endless", endless)
    assert [row.status for row in report.rows] == ["not run"]


def test_nothing_runs_after_the_gpu_was_lost(tmp_path, monkeypatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    report = Report(tmp_path / "found.json", {}, 60)

    def section() -> None:
        with report.section("first", 60):
            report.check("reads page -1", lost)
            report.check("more", lambda: None)

    with pytest.raises(DeviceLost):
        section()
    assert [row.status for row in report.rows] == ["FAIL"]
    assert report.path.exists()


@pytest.mark.parametrize("lost", ["left out", "made files"])
def test_links_that_a_copy_of_the_tree_lost_are_mended(tmp_path, lost) -> None:
    skip = ignore_patterns("__pycache__", "tabletalk")
    for folder in ("radixcache", "kernels", "runtime", "bench"):
        copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=skip)
    for name in ("kernels", "runtime"):
        link = tmp_path / "radixcache" / name
        link.unlink()
        if lost == "made files":
            link.write_text(f"../{name}")
    code = (
        "import bench.gpu_check as check; check.mend_links()\n"
        "import radixcache.runtime.engine.sampling as sampling, importlib.util\n"
        "print(sampling.__file__, importlib.util.find_spec('radixcache.kernels.upload').origin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert f"the link {tmp_path / 'radixcache/kernels'} did not survive" in done.stdout
    found = done.stdout.split()[-2:]
    assert found == [
        str(tmp_path / "runtime/engine/sampling.py"),
        str(tmp_path / "kernels/upload.py"),
    ]
