"""The GPU check, rehearsed on a pretended GPU: every line of it runs, and it can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache import RadixCache
from radixcache.bench.gpu import check, correctness, equality, peers
from radixcache.bench.gpu.models import random_llama
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import DeviceLost, Figure, NotRun, Report, Row, failed, table
from radixcache.bench.gpu.sizes import FULL, SMALL
from radixcache.runtime.engine import engine
from radixcache.runtime.engine.scheduler import DECODE_AHEAD
from tests.bench.gpu.rehearsal import rehearsal_place
from tests.models import continuous_batching

Found = dict[str, dict[str, Row]]
"""Rows by section and name."""


def run(folder: Path, *sections: str, prepare: Callable[[Place], Any] | None = None) -> Found:
    """Sections in this process, on the pretended GPU."""
    found: Found = {}
    with rehearsal_place(folder) as place:
        place.ceilings = {"bytes/s": 1e12, "flop/s": 1e15, "launch s": 1e-6}
        if prepare is not None:
            prepare(place)
        for section in sections:
            report = Report(section, folder / f"{section}.jsonl", 600)
            check.run_section(section, place, report)
            found[section] = {row.name: row for row in report.rows}
    return found


def radixcache_parts() -> list[object]:
    return [vars(engine)["group_by_prefix"], sys.modules.get("flashinfer"), torch.cuda.Event]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("rehearsal")
    return path


@pytest.fixture(scope="module")
def rehearsed(folder) -> Found:
    before = radixcache_parts()
    found = run(folder, *check.SECTIONS)
    assert radixcache_parts() == before  # nothing stays replaced
    return found


def test_a_rehearsal_goes_through_every_section_and_finds_nothing_wrong(rehearsed) -> None:
    rows = [row for section in rehearsed.values() for row in section.values()]
    assert set(rehearsed) == set(check.SECTIONS) and all(rehearsed.values())
    assert [str(row) for row in rows if row.status == "FAIL"] == []
    assert {row.name for row in rows if row.status == "not run"} == {
        "transformers' generate_batch",  # in a thread of its own, which pretends nothing
    }


def test_every_path_is_checked_at_every_shape(rehearsed) -> None:
    names = rehearsed["correctness"]
    for path in ("decode", "suffix", "fresh", "mixed", "cascade", "cascade, mixed", "graphs"):
        for page_size in (1, 16):
            for dim in SMALL.head_dims:
                for group in (1, 4, 8):
                    row = f"{path}: page {page_size}, head_dim {dim}, GQA {group}"
                    assert names[row].status == "ok"
    assert FULL.head_dims == (64, 128) and FULL.period == DECODE_AHEAD
    assert sum(name.startswith("self-test") for name in names) == 7
    for rule in ("window", "softcap", "window and softcap"):
        assert {f"{rule}, 8/2 heads", f"{rule}, 8/4 heads"} <= set(names)


def test_every_figure_of_the_plan_has_a_row(rehearsed) -> None:
    for batch in SMALL.decode_batches:
        name = f"decode, batch {batch} x {SMALL.decode_context}, page 16"
        assert {name, f"{name}: device alone", f"{name}: overhead of the engine"} <= set(
            rehearsed["decode"]
        )
        assert rehearsed["decode"][name].lines  # the host's phases
    for cached in SMALL.cached:
        name = f"TTFT of {SMALL.question} tokens on {cached} cached, page 16"
        assert {name, f"{name}: cold over cached"} <= set(rehearsed["ttft"])
    cascades = rehearsed["cascade"]
    points = len(SMALL.rows) * len(SMALL.shared) * len(SMALL.heads) + 1  # one with page size 1
    assert sum("rows" in n and n.startswith("flat over") for n in cascades) == points
    assert sum(n.startswith("break-even") for n in cascades) == len(SMALL.heads)
    assert sum("flat over cascade, step" in n for n in cascades) == len(SMALL.shared_in_engine)
    caches = [name.partition(":")[0] for name in rehearsed["reuse"]]
    assert caches == ["radix, page 16", "radix, page 1", "hash-block 16", "no cache"]


def test_profiles_leave_traces(rehearsed, folder) -> None:
    traces = {path.name for path in (folder / "traces").iterdir()}
    assert len(traces) == len(rehearsed["profiles"]) and "decode_step_of_1.json.gz" in traces
    assert all(row.lines for row in rehearsed["profiles"].values())


def test_the_same_requests_prefill_least_with_a_radix_tree(rehearsed) -> None:
    notes = {n.partition(":")[0]: r.text for n, r in rehearsed["reuse"].items()}
    prefilled = {name: int(note.split()[1]) for name, note in notes.items()}
    assert prefilled["radix, page 1"] <= prefilled["hash-block 16"] < prefilled["no cache"]
    assert prefilled["radix, page 16"] < prefilled["hash-block 16"]


@continuous_batching
def test_the_peer_answers(tmp_path) -> None:
    place = Place(torch.device("cpu"), torch.float32, SMALL, tmp_path, None)
    assert peers.generate_two_turns(place, random_llama(place, SMALL.big)) > 0


def plant(place: Place) -> None:
    place.planted = True


def test_wrong_pages_fail_the_check(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(correctness, "GROUPS", {4: (8, 2)})
    found = run(tmp_path, "correctness", prepare=plant)["correctness"]
    planted = {n: r.status for n, r in found.items() if "head_dim" in n and "fresh" not in n}
    assert len(planted) == 12 and set(planted.values()) == {"FAIL"}
    assert all(row.status == "ok" for name, row in found.items() if "self-test" in name)
    assert "FAIL" in capsys.readouterr().out and failed(found.values())


def test_other_tokens_than_transformers_fail_the_check(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(equality, "CACHES", {"radix": (RadixCache, 16)})
    found = run(tmp_path, "equality", prepare=plant)["equality"]
    assert found["radix = plain transformers"].status == "FAIL"
    assert "below the best one's" in found["radix = plain transformers"].text


def test_without_flashinfer_the_torch_backend_is_measured(tmp_path, monkeypatch) -> None:
    def leave_out(place: Place) -> None:
        place.kernels = None
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # until the rehearsal ends
        sys.modules["radixcache.kernels.flashinfer_backend"] = None  # type: ignore[assignment]

    monkeypatch.setattr(equality, "CACHES", {"radix": (RadixCache, 16)})
    sections = ("environment", "smoke", "equality", "decode")
    found = run(tmp_path, *sections, prepare=leave_out)
    rows = [row for section in found.values() for row in section.values()]
    assert [str(row) for row in rows if row.status == "FAIL"] == []
    assert found["environment"]["FlashInfer runs"].status == "not run"
    assert {row.status for row in found["smoke"].values()} == {"not run"}
    assert found["equality"]["radix = plain transformers"].status == "ok"
    name = f"decode, batch 1 x {SMALL.decode_context}, page 16"
    assert found["decode"][name].status in ("met", "missed")


def test_why_flashinfer_does_not_run_is_told_in_full(tmp_path) -> None:
    def breaks(*_: object) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    def break_backend(place: Place) -> None:
        assert place.kernels is not None
        vars(place.kernels[1])["FlashInferBackend"] = breaks

    row = run(tmp_path, "environment", prepare=break_backend)["environment"]["FlashInfer runs"]
    assert row.status == "FAIL" and "libcudart.so.13" in row.text
    assert "Traceback" in row.lines[0] and any("in breaks" in line for line in row.lines)


# The report.


@pytest.fixture
def report(tmp_path) -> Report:
    return Report("first", tmp_path / "first.jsonl", 60)


def raises(error: BaseException):
    def work():
        raise error

    return work


def test_checks_stand_alone(report, tmp_path) -> None:
    class MissingJITCacheError(Exception):
        pass

    report.check("right", lambda: "well")
    report.check("wrong", raises(ValueError("so it is\nand more")))
    report.check("missing", raises(MissingJITCacheError("kernel")))
    report.check("impossible", raises(NotRun("not here")))
    report.measure("figures", lambda: [Figure("a", 1.0, "x", at_most=2), Figure("b", 1, "x")])
    report.measure("slow", lambda: Figure("c", 3.0, "x", at_most=2, lines=["why"]))
    report.measure("small", lambda: Figure("d", 3.0, "x", at_least=4))
    late = Report("late", tmp_path / "first.jsonl", -1)
    late.check("never", raises(AssertionError("it ran")))
    assert [(row.name, row.status) for row in report.rows + late.rows] == [
        ("right", "ok"),
        ("wrong", "FAIL"),
        ("missing", "not run"),
        ("impossible", "not run"),
        ("a", "met"),
        ("b", "measured"),
        ("c", "missed"),
        ("d", "missed"),
        ("never", "not run"),
    ]
    assert report.rows[1].text == "ValueError: so it is" and report.rows[6].lines == ["why"]
    assert "| first | c | missed | ≤ 2 | 3 x |" in table(report.rows)
    assert len((tmp_path / "first.jsonl").read_text().split("\n\n")) == 9


def test_a_report_in_which_nothing_ran_is_a_failure(report) -> None:
    report.not_run("all", "no kernels")
    assert failed(report.rows)
    report.check("something", lambda: None)
    assert not failed(report.rows)


def test_a_section_ends_where_its_process_has_lost_the_device(report, monkeypatch) -> None:
    lost = raises(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="after reads page -1"):
        report.check("reads page -1", lost)
    assert [row.status for row in report.rows] == ["FAIL"]
