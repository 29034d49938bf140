"""What `radixcache bench` says on a terminal: whole tables, reasons in words, the verdict."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from radixcache.bench import cli
from radixcache.bench.report.results import Report
from radixcache.bench.report.terminal import index_table, print_report, print_verdict, remarks
from radixcache.bench.workloads.choice import DEFAULT, choose
from radixcache.runtime.cli import main
from tests.bench.test_report import figures, workload

SMALL = ["bench", "best-of-n:questions=4,n=3", "--schemes", "none", "hash-16", "radix-1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where a report by default is written."""
    monkeypatch.chdir(tmp_path)


def parsed(*words):
    parser = argparse.ArgumentParser()
    cli.add_flags(parser)
    return parser.parse_args(words)


def shown(report, width, show=print_report):
    out = StringIO()
    show(report, Console(file=out, width=width, highlight=False))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_are_whole_at_every_width(width):
    """With figures as long as they get: every name, number and remark is there."""
    rows = [figures(name, 123_456_789, memory="100%") for name in ("aligned-16", "hash-256")]
    for row in rows:
        row.cache_us, row.refused, row.preemptions = 123_456.0, 10_000, 100_000
    lines = shown(Report({"seed": 0}, [workload(*rows)]), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for name in ("memory", "scheme", "hit", "of optimum", "prefilled", "cache µs", "remark"):
        assert name in text
    for cell in (
        "aligned-16",
        "hash-256",
        "123,456,789",
        "123,456",
        "10,000 refused,",
        "preempted",
    ):
        assert cell in text
    assert "…" not in text


def test_a_table_without_remarks_has_no_column_for_them():
    headers = [column.header for column in index_table(workload(figures("radix-1", 5))).columns]
    assert headers == ["memory", "scheme", "hit", "of optimum", "prefilled", "cache µs"]


def rows_of(memory, *pairs, **more):
    return [figures(scheme, 10_000 - hit, memory=memory, **more) for scheme, hit in pairs]


def test_why_nothing_is_hit_is_said_in_words():
    alone = workload(*rows_of("1000", ("none", 0), ("hash-16", 0), ("radix-1", 0)))
    alone.optimal_hits = {1000: 9000}
    (said,) = remarks(alone)
    assert said == (
        "1000: nothing is hit: the requests in flight fill the memory, and nothing else is kept."
    )
    blocks = workload(*rows_of("1000", ("hash-64", 0), ("radix-1", 7)))
    blocks.rows += rows_of("100%", ("hash-64", 0), ("radix-1", 7))
    blocks.optimal_hits = {1000: 9000}
    (said,) = remarks(blocks)
    assert said.startswith("1000, 100%: hash-64 hit nothing: less than a block is shared")
    apart = workload(*rows_of("1000", ("hash-64", 0), ("radix-1", 0)))
    apart.unlimited_hits = 0
    assert remarks(apart) == ["1000: nothing is hit, because no two prompts begin alike."]


def test_refused_and_preempted_requests_are_said_beside_the_figures_they_spoil():
    spoilt = workload(
        *rows_of("1000", ("hash-16", 10), refused=2), *rows_of("999", ("radix-1", 10))
    )
    spoilt.rows[1].preemptions = 3
    spoilt.longest, spoilt.optimal_hits = 2000, {1000: 9000}
    refused, preempted = remarks(spoilt)
    assert refused.startswith("1000: refused requests do not fit into 1,000 tokens")
    assert "(the longest needs 2,000)" in refused
    assert preempted.startswith("999: too little for the requests in flight (radix-1)")
    lines = shown(Report({}, [spoilt]), 80)
    assert any("hash-16" in line and "2 refused" in line for line in lines)
    assert any("radix-1" in line and "3 preempted" in line for line in lines)


def test_a_replay_above_the_optimum_is_explained(capsys):
    """Who has most in the cache is served first; the optimum takes requests as they come."""
    spec = "documents:questions=60,document=200,documents=8,question=4"
    flags = (
        "--schemes radix-1 --memory 555 --concurrency 32 --json x.json --schedule-policy".split()
    )
    assert main(["bench", spec, *flags, "lpm"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "555: radix-1 above the optimum, which serves one request after the other" in said
    assert main(["bench", spec, *flags, "fcfs"]) == 0
    assert "above the optimum" not in " ".join(capsys.readouterr().out.split())


def test_the_verdict_is_three_lines():
    rows = [figures("hash-16", 1000), figures("radix-1", 500)]
    rows += [figures("hash-16", 800, memory="100%"), figures("radix-1", 800, memory="100%")]
    one, other = workload(*rows), workload(figures("hash-16", 5), figures("radix-16", 10))
    other.name = "x"
    lines = shown(Report({}, [one, other]), 80, print_verdict)
    assert [line.strip() for line in lines[1:]] == [
        "radix less:       w at 30% (2.00x)",
        "a tie:            w at 100% (1.00x)",
        "hash-block less:  x (0.50x)",
    ]
    assert shown(Report({}, [workload(figures("radix-1", 5))]), 80, print_verdict) == []


def test_the_verdict_has_a_line_for_what_nobody_can_tell():
    rows = [figures("hash-16", 9000), figures("radix-1", 7000)]
    rows += [figures("hash-256", 10_000, memory="9%"), figures("radix-1", 7000, memory="9%")]
    few = workload(*(replace(row, cold=190) for row in rows[:2]))
    few.name = "x"
    lines = shown(Report({}, [workload(*rows), few]), 80, print_verdict)
    assert [line.strip() for line in lines[1:]] == [
        "radix less:       w (1.29x, the other hits nothing)",
        "a tie:            nowhere",
        "hash-block less:  nowhere",
        "too little data:  x (10 requests hit anything)",
    ]


def test_why_lru_hits_little_is_said_in_words():
    rows = rows_of("30%", ("hash-16", 2000), ("radix-16", 1500), ("radix-1", 2200))
    for row, empty in zip(rows, (0.004, 0.024, 0.003), strict=True):
        row.empty_share = empty
    found = workload(*rows)
    found.optimal_hits, found.footprint = {1000: 7000}, 3333
    drives, cycle = remarks(found)
    assert drives == (
        "30%: radix-16 computes more than hash-16: the half-filled pages that it keeps (2.4% of "
        "its slots are empty) drive out full ones."
    )
    assert cycle == (
        "30%: no scheme hits half of the optimum: all evict what was used least recently (LRU), "
        "and that is asked for again no later than the rest, in a cycle of prompts even first."
    )
    found.optimal_hits = {1000: 4000}
    assert remarks(found) == [drives]
    rows[1].empty_share = 0.001
    assert remarks(found) == []


def test_what_is_printed_fits_80_columns_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([*SMALL, "--json", "x.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 80 and any(line.endswith("preempted") for line in lines)


def test_without_what_draws_pages_the_table_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("radixcache.bench.cli.find_spec", lambda name: None)
    assert main(SMALL) == 0
    said = capsys.readouterr().out
    assert "radix-1" in said and not list(tmp_path.iterdir())
    assert said.splitlines()[-1] == (
        "No report is written: it needs vl-convert: pip install '.[bench]' in a checkout."
    )
    assert main([*SMALL, "--json", "x.json"]) == 0
    assert "No report" not in capsys.readouterr().out


def test_a_report_is_written_where_it_says_by_default(tmp_path, capsys):
    assert main(SMALL) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "The report is in bench-report.html."
    assert said.err == "", "no bar where no terminal shows it"
    assert "best-of-n" in (tmp_path / "bench-report.html").read_text()


@pytest.mark.parametrize("flags", [["--json", "-"], ["--json", "x.json"], ["--report", "x.html"]])
def test_no_other_report_is_written_than_asked_for(flags, tmp_path, capsys):
    assert main([*SMALL, *flags]) == 0
    assert ("x.html." in capsys.readouterr().out) == (flags[1] == "x.html")
    assert not (tmp_path / "bench-report.html").exists()


def test_one_bar_says_what_runs_and_how_much_is_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main([*SMALL, "--json", "x.json"]) == 0
    said = capsys.readouterr().err
    assert "bounds, best-of-n" in said and "100%, best-of-n" in said and " left" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["chat:turns=2", "short", "--memory", "2GB", "10%", "--schemes", "radix-1", "none"],
        ["--file", "a b.jsonl", "--format", "sessions", "--hash-block", "16", "--seed", "3"],
        ["chat", "--arrivals", "poisson", "--rate", "2.5", "--report", "it's.html"],
    ],
)
def test_the_command_runs_it_again(words):
    program, bench, *again = shlex.split(cli.command(parsed(*words)))
    assert (program, bench) == ("radixcache", "bench")
    assert parsed(*again) == parsed(*words)


def test_without_arguments_workloads_for_different_reasons_run():
    chosen = choose(parsed(), 1 << 15)
    assert tuple(workload.name for workload in chosen) == DEFAULT
    assert all(workload.arrivals for workload in chosen)


def test_a_share_that_is_less_than_two_pages_is_told_to_be_more():
    found = workload(figures("hash-256", 90))
    found.rows[0].memory_tokens = 512
    found.footprint = 100
    assert remarks(found)[0].startswith("30%: these are 512 tokens, not 30: all schemes get")
    found.footprint = 1706
    assert not any("these are" in line for line in remarks(found))
