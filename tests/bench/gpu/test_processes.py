"""Sections in processes of their own: whatever one does, the others run and all are reported."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from radixcache.bench.gpu import check, llm, processes
from radixcache.bench.gpu.check import CANNOT_RUN, SECTIONS, Section, main
from radixcache.bench.gpu.report import Row

OK = "row('works', 'ok')"
FLASHINFER = "row('FlashInfer runs', 'ok')"


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Runs sections that are a line of Python each; gives the exit code and the rows."""

    def run(*options: str, **sections: str) -> tuple[int, list[dict]]:
        started = {"environment": FLASHINFER, **sections}
        monkeypatch.setattr(check, "SECTIONS", {n: Section(1, 1) for n in started})
        monkeypatch.setattr(processes, "GRACE", 0.2)
        monkeypatch.setattr(processes, "_LOOK", 0.02)

        def command(name: str, options: list[str]) -> list[str]:
            prelude = f"""
import json, os, signal, sys, time
def row(name, status):
    row = dict(section={name!r}, name=name, status=status, text=' '.join({options!r}))
    with open({str(tmp_path / name)!r} + '.jsonl', 'a') as file:
        file.write(json.dumps(row) + chr(10))
"""
            return [sys.executable, "-S", "-c", prelude + started[name]]

        monkeypatch.setattr(check, "command_of", command)
        code = main(["--out", str(tmp_path), *options])
        return code, json.loads((tmp_path / "gpu_check.json").read_text())["rows"]

    return run


def statuses(rows: list[dict]) -> list[tuple[str, str, str]]:
    return [(row["section"], row["name"], row["status"]) for row in rows]


def test_no_section_ends_the_others_and_each_is_reported(fakes, tmp_path, capsys) -> None:
    hang = "sys.stderr.write('waits for the device'); sys.stderr.flush(); time.sleep(60)"
    code, rows = fakes(
        hangs=f"{OK}; {hang}",
        ignores=f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {hang}",
        crashes=f"{OK}; os.kill(os.getpid(), signal.SIGSEGV)",
        raises="raise RuntimeError('CUDA error: an illegal memory access was encountered')",
        breaks_off=f"{OK}; open({str(tmp_path / 'breaks_off.jsonl')!r}, 'a').write('{{')",
        goes_on=OK,
    )
    assert code == 1
    assert statuses(rows) == [
        ("environment", "FlashInfer runs", "ok"),
        ("hangs", "works", "ok"),
        ("hangs", "the process", "FAIL"),
        ("ignores", "the process", "FAIL"),
        ("crashes", "works", "ok"),
        ("crashes", "the process", "FAIL"),
        ("raises", "the process", "FAIL"),
        ("breaks_off", "works", "ok"),
        ("goes_on", "works", "ok"),
    ]
    ended = {row["section"]: row for row in rows if row["status"] == "FAIL"}
    assert ended["hangs"]["text"] == ended["ignores"]["text"] == "took longer than its 1 s"
    assert ended["hangs"]["lines"] == ["waits for the device"]
    assert ended["crashes"]["text"] == "killed by SIGSEGV"
    assert ended["raises"]["text"] == "exit status 1"
    table = (tmp_path / "gpu_check.md").read_text()
    assert "CUDA error: an illegal memory access" in table and "| goes_on | works | ok |" in table
    assert "4 FAIL" in table and table in capsys.readouterr().out


def test_what_a_dying_process_leaves_in_the_files_costs_no_other_row(fakes, tmp_path) -> None:
    half = f"open({str(tmp_path / 'half.jsonl')!r}, 'ab').write(bytes([123, 34, 0xE2]))"
    code, rows = fakes(
        half=f"{OK}; {half}; os.abort()",
        numbered=f"{OK}; os.kill(os.getpid(), signal.SIGRTMIN + 1)",
        unreadable=f"os.mkdir({str(tmp_path)!r} + '/unreadable.jsonl')",
        goes_on=OK,
    )
    assert code == 1
    assert statuses(rows)[1:] == [
        ("half", "works", "ok"),
        ("half", "the process", "FAIL"),
        ("numbered", "works", "ok"),
        ("numbered", "the process", "FAIL"),
        ("unreadable", "its rows", "FAIL"),
        ("goes_on", "works", "ok"),
    ]
    told = [row["text"] for row in rows if row["status"] == "FAIL"]
    assert told[:2] == ["killed by SIGABRT", f"killed by signal {signal.SIGRTMIN + 1}"]


def test_what_a_section_has_started_ends_with_it(tmp_path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    )
    status, told = processes.run([sys.executable, "-S", "-c", code], 10, tmp_path / "log")
    assert (status, told) == (0, "")
    state, end = Path(f"/proc/{pid.read_text()}/stat"), time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_where_flashinfer_does_not_run_the_others_do_without(fakes) -> None:
    _, rows = fakes(environment="row('FlashInfer runs', 'FAIL')", next=OK)
    assert "--torch" in rows[1]["text"] and "--torch" not in rows[0]["text"]
    _, rows = fakes(environment="os.abort()", next=OK)
    assert "--torch" in rows[1]["text"]
    _, rows = fakes(next=OK)
    assert "--torch" not in rows[1]["text"]


def test_without_a_device_nothing_else_is_started(fakes) -> None:
    code, rows = fakes(environment=f"sys.exit({CANNOT_RUN})", next=OK)
    assert code == CANNOT_RUN and "next" not in {row["section"] for row in rows}


def test_results_of_several_calls_are_merged(fakes, tmp_path) -> None:
    fakes(first=OK)
    other = tmp_path / "other"
    other.mkdir()
    Row("second", "works", "ok").append_to(other / "second.jsonl")
    code, rows = fakes("--merge", str(tmp_path), str(other), first=OK, second=OK)
    assert code == 0 and [row["section"] for row in rows] == ["environment", "first", "second"]


def test_each_call_ends_within_nine_minutes_whatever_hangs() -> None:
    for call in (1, 2, 3):
        names = [name for name, section in SECTIONS.items() if section.call == call]
        names = check.with_what_they_need(names, Path("no ceilings yet"))
        assert names[0] == "environment"
        assert sum(SECTIONS[name].seconds + processes.GRACE for name in names) <= 540
    calls = [section.call for section in SECTIONS.values()]
    assert calls == sorted(calls)
    assert [name for name in SECTIONS if SECTIONS[name].call == 2][-1] == "profiles"


def test_ceilings_are_measured_only_where_they_are_needed_and_not_there(tmp_path) -> None:
    ceilings = tmp_path / "ceilings.json"
    assert check.with_what_they_need(["ttft"], ceilings) == ["environment", "ceilings", "ttft"]
    assert check.with_what_they_need(["llm"], ceilings) == ["environment", "llm"]
    ceilings.touch()
    assert check.with_what_they_need(["ttft"], ceilings) == ["environment", "ttft"]


def test_a_machine_without_a_gpu_is_told_so_in_one_sentence(tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--out", str(tmp_path)]) == CANNOT_RUN  # by a section in a process of its own
    assert "cannot run here: no CUDA device is visible" in capsys.readouterr().out


def test_a_section_of_a_rehearsal_writes_what_the_next_ones_need(tmp_path, capsys) -> None:
    assert main(["--rehearse", "--section", "ceilings", "--out", str(tmp_path)]) == 0
    assert set(json.loads((tmp_path / "ceilings.json").read_text())) == {
        "bytes/s", "flop/s", "launch s",
    }  # fmt: skip
    assert "device-to-device copy" in capsys.readouterr().out


def test_a_server_in_another_process_is_waited_for(monkeypatch, tmp_path) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho loading >&2; echo Serving m at http://h:1 '(x)' >&2; sleep 9"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with llm.serve_apart(["serve"]) as url:
        assert url == "http://h:1"
    script.write_text("#!/bin/sh\necho no such device >&2; exit 1")
    with pytest.raises(AssertionError, match="no such device"), llm.serve_apart(["serve"]):
        pass
    with pytest.raises(AssertionError, match="no such device"):
        llm.generate_apart(["generate"])
