"""`radixcache bench`: its flags, its tables, its JSON and its pages."""

from __future__ import annotations

import json

import pytest

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.results import Report, WorkloadReport, verdicts
from radixcache.runtime.cli import main

SMALL = ["bench", "best-of-n:questions=4,n=3", "chat:conversations=3,turns=3,user=20,answer=20"]


def figures(scheme, computed, *, level="index", memory="30%", refused=0, hits=()):
    return Figures(
        level=level,
        workload="w",
        scheme=scheme,
        page_size=16,
        memory=memory,
        memory_tokens=1000,
        requests=2,
        refused=refused,
        prompt_tokens=10_000,
        hit_tokens=10_000 - computed,
        computed_tokens=computed,
        preemptions=0,
        evicted_tokens=0,
        computed_by_turn=[1.0],
        seconds=1.0,
        hits=list(hits),
    )


def workload(*rows):
    return WorkloadReport("w", "shape", 2, 10_000, 100, 5000, 9000, rows=list(rows))


@pytest.mark.parametrize(
    ("block", "tree", "said"),
    [
        (1000, 1100, "hash-block wins: hash-16 prefills 9.1% less than radix-16"),
        (1000, 1010, "a tie: hash-16 prefills 1.0% less than radix-16"),
        (1010, 1000, "a tie: hash-16 prefills 1.0% more than radix-16"),
        (1800, 1000, "radix wins: hash-16 prefills 1.80x the tokens of radix-16"),
    ],
)
def test_the_verdict_names_the_winner_whoever_it_is(block, tree, said):
    rows = [figures("none", 9000), figures("hash-16", block), figures("radix-16", tree)]
    assert verdicts(workload(*rows))[0] == f"w, 30%: {said}"


def test_the_best_of_each_side_is_compared_and_those_that_refused_are_not():
    rows = [
        figures("hash-16", 1000),
        figures("hash-256", 10, refused=1),
        figures("hash-32", 900),
        figures("radix-1", 800),
        figures("radix-16", 950),
        figures("whole-16", 1),
        figures("aligned-16", 1),
    ]
    (said,) = verdicts(workload(*rows))
    assert "hash-32 prefills 1.12x the tokens of radix-1" in said


def test_what_hash_block_does_better_page_for_page_is_said():
    rows = [figures("hash-16", 1000), figures("radix-16", 990), figures("radix-1", 500)]
    rows[2].page_size = 1
    rows[0].empty_share, rows[1].empty_share = 0.02, 0.2
    assert verdicts(workload(*rows)) == [
        "w, 30%: radix wins: hash-16 prefills 2.00x the tokens of radix-1",
        "w, 30%: hash-16 prefills 1.010x the tokens of radix-16",
        "w, 30%: hash-16 leaves 2.0% of its slots empty, radix-16 20.0%",
    ]


def test_levels_that_differ_are_reported():
    index, engine = figures("radix-1", 5, hits=[1, 2]), figures("radix-1", 5, level="engine")
    assert workload(index).disagreements is None
    engine.hits = [1, 2]
    assert workload(index, engine).disagreements == 0
    engine.hits = [3, 2]
    assert workload(index, engine).disagreements == 1


def test_the_command_prints_tables_and_writes_json_and_a_page(tmp_path, capsys):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    schemes = ["--schemes", "none", "hash-16", "radix-1"]
    assert main([*SMALL, *schemes, "--report", str(page), "--json", str(data)]) == 0
    said = capsys.readouterr().out
    assert "best-of-n:questions=4,n=3" in said and "radix wins" in said
    found = json.loads(data.read_text())
    assert found["settings"]["level"] == "index"
    assert [len(w["rows"]) for w in found["workloads"]] == [6, 6]
    row = found["workloads"][0]["rows"][5]
    assert (
        row["scheme"] == "radix-1"
        and row["hit_tokens"] + row["computed_tokens"] == (found["workloads"][0]["prompt_tokens"])
    )
    html = page.read_text()
    assert html.count("data:image/png;base64,") == 3  # two hit rates, one by turn
    assert "prefill tokens by turn" in html
    assert "<script" not in html and 'src="http' not in html
    assert all(line.strip() in html for line in said.splitlines() if "radix-1 " in line)
    assert html.count("radix wins") == said.count("radix wins") > 0


def test_a_markdown_page_has_the_tables_and_its_charts_beside_it(tmp_path, capsys):
    page = tmp_path / "r.md"
    assert main([SMALL[0], SMALL[1], "--schemes", "radix-1", "--report", str(page)]) == 0
    capsys.readouterr()
    lines = page.read_text().splitlines()
    assert "## best-of-n:questions=4,n=3" in lines
    tables = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    assert tables[0][1:4] == ["memory", "scheme", "hit"] and set("".join(tables[1])) == {"-"}
    assert tables[2][1:3] == ["30%", "radix-1"] and tables[3][1:3] == ["100%", "radix-1"]
    assert "![best-of-n:questions=4,n=3: hit rate over memory](r-1.png)" in lines
    assert (tmp_path / "r-1.png").read_bytes().startswith(b"\x89PNG")


def test_both_levels_agree_in_the_command(capsys):
    spec = "short:requests=6,answer=2"
    flags = "--level both --schemes none radix-16 --repeats 1 --json -".split()
    assert main(["bench", spec, *flags, "--memory", "2000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workloads"][0]["disagreements"] == 0
    engine = [row for row in found["workloads"][0]["rows"] if row["level"] == "engine"]
    assert [row["scheme"] for row in engine] == ["none", "radix-16"]
    assert all(row["engine"]["ttft_p99"]["median"] > 0 for row in engine)


def test_a_file_is_replayed(tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("the same words at first, then one\nthe same words at first, then two\n" * 3)
    flags = ["--format", "prompts", "--schemes", "radix-1", "--memory", "100%", "--json", "-"]
    assert main(["bench", "--file", str(path), *flags]) == 0
    found = json.loads(capsys.readouterr().out)["workloads"][0]
    assert found["requests"] == 6 and found["rows"][0]["hit_tokens"] > 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--schemes", "radix"], "no scheme 'radix'; say none, hash-16"),
        (["--schemes", "none-16"], "no scheme 'none-16'"),
        (
            ["--schemes", "family", "--level", "both"],
            "template-16, prefix-16, cow-16: at index level only, without a model",
        ),
        (["--memory", "0%"], "not an amount of memory: '0%'"),
        (["--memory", "lots"], "not an amount of memory: 'lots'"),
        (["--concurrency", "0"], "--concurrency must be more than 0, not 0"),
        (["--file", "x"], "--file and --format go together"),
        (["--arrivals", "poisson"], "needs a --rate"),
        (["--arrivals", "trace"], "needs a file with times"),
        (["--report", "x.pdf"], "a report ends in .html or .md"),
        (["--report", "/nowhere/x.html"], "cannot write /nowhere/x.html: No such file"),
        (["--json", "/"], "cannot write /: Is a directory"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--step-time", "nan"], "--step-time must be more than 0, not nan"),
        (["nothing"], "no workload 'nothing'"),
        (["--file", "/nowhere", "--format", "mooncake"], "cannot read /nowhere"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(flags, complaint, capsys):
    assert main(["bench", *flags]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_nothing_can_be_written_where_there_is_no_folder(tmp_path, capsys):
    flags = ["--schemes", "radix-1", "--json", str(tmp_path / "no" / "where.json")]
    assert main([SMALL[0], SMALL[1], *flags]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_report_without_workloads_is_empty_but_whole():
    assert json.loads(Report({"seed": 0}).to_json())["workloads"] == []


def test_a_run_that_is_refused_leaves_the_files_as_they_were(tmp_path, capsys):
    there, fresh = tmp_path / "there.html", tmp_path / "fresh.json"
    there.write_text("of yesterday")
    assert main(["bench", "nothing", "--report", str(there), "--json", str(fresh)]) == 2
    assert "no workload 'nothing'" in capsys.readouterr().err
    assert there.read_text() == "of yesterday" and not fresh.exists()


def test_a_report_without_matplotlib_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("radixcache.bench.report.pages.find_spec", lambda name: None)
    assert main(["bench", *SMALL[1:], "--report", str(tmp_path / "r.md")]) == 2
    assert "a report needs matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
