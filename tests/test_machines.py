"""`make test-machines`: a profile that fails is told from one that this machine cannot have."""

from __future__ import annotations

import sys

import pytest

from tests import machines
from tests.machines import Impossible, Outcome, Profile

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure/></testcase>
<testcase classname="tests.a" name="broken"><error/></testcase>
<testcase classname="tests.a" name="left out"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_and_failures_are_named(tmp_path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = machines.read_report(tmp_path / "report.xml", "a machine")
    assert outcome == Outcome(1, 2, 1, "a machine", ["tests.a::bad", "tests.a::broken"])


def test_a_profile_that_is_not_what_it_claims_fails(monkeypatch) -> None:
    monkeypatch.setattr(machines, "probe", lambda python, environment: "AVX512, native kernels")
    outcome = Profile("AVX2, native kernels").run("avx2", [])
    assert outcome.failures == ["it is AVX512, native kernels, not AVX2, native kernels"]


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    names, pins = machines.requirements()
    assert {"numpy", "torch", "transformers"} <= set(names)
    assert {"numpy==1.26", "torch==2.11", "transformers==5.17"} <= set(pins)


def test_an_interpreter_that_is_nowhere_is_told() -> None:
    with pytest.raises(Impossible, match="no Python 3\\.999"):
        machines.find_python("3.999")


def test_what_cannot_be_had_fails_nothing_and_a_failure_does(monkeypatch, capsys) -> None:
    def impossible(name: str, options: list[str]) -> Outcome:
        raise Impossible("no such processor")

    def run(name: str, options: list[str]) -> Outcome:
        return Outcome(5, len(options), 2, "a machine", options)

    monkeypatch.setattr(machines, "PROFILES", {"mars": impossible, "here": run})
    monkeypatch.setattr(sys, "argv", ["machines"])
    assert machines.main() == 0
    said = capsys.readouterr().out
    assert "| mars | not run: no such processor |" in said
    assert "| here | a machine | 5 | 0 | 2 |" in said
    monkeypatch.setattr(sys, "argv", ["machines", "here", "--", "-x"])
    assert machines.main() == 1
    assert "here: -x" in capsys.readouterr().out
