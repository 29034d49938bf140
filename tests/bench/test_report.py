"""`radixcache bench`: its flags, its tables, its sentences, its JSON and its page."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from radixcache.bench import cli
from radixcache.bench.args import BenchArgs
from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.columns import INDEX, STATES
from radixcache.bench.report.files import write
from radixcache.bench.report.pages import as_html
from radixcache.bench.report.results import Report, WorkloadReport
from radixcache.bench.report.terminal import print_report
from radixcache.bench.report.verdicts import headline, remarks
from radixcache.errors import InvalidRequest
from radixcache.runtime.cli import main
from tests.runtime.server.page.browser import INSTALLED, browser

TINY = "chat:conversations=2,turns=2,user=4,answer=4,system=40"
SMALL = ["best-of-n:questions=8,n=3", "chat:conversations=3,turns=3,user=20,answer=20"]
SCHEMES = "none hash-16 hash-32 hash-64 radix-1 aligned-16".split()
CELL = "<t[hd].*?</t[hd]>"
HOSTILE = "</script><script>alert('1')</script> & \"quoted\""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where a report by default is written."""
    monkeypatch.chdir(tmp_path)


def parsed(*words):
    parser = argparse.ArgumentParser()
    cli.add_flags(parser)
    return BenchArgs.of(parser.parse_args(words))


def figures(scheme, computed, *, memory="30%", **more):
    row = Figures(
        level="index",
        workload="w",
        scheme=scheme,
        page_size=int(size) if (size := scheme.partition("-")[2]).isdecimal() else 16,
        memory=memory,
        memory_tokens=1000,
        requests=200,
        refused=0,
        prompt_tokens=10_000,
        hit_tokens=10_000 - computed,
        computed_tokens=computed,
        preemptions=0,
        computed_by_turn=[1.0],
        seconds=1.0,
    )
    return replace(row, **more)


def workload(*rows, **more):
    optimum = more.pop("optimal_hits", {1000: 10_000})
    found = WorkloadReport("w", "shape", 200, 10_000, 100, 5000, 9000, rows=list(rows))
    return replace(found, optimal_hits=optimum, **more)


NOT_ALL = {"refused": 1}
FEW = "too little data for a verdict"


def fewer(winner, percent, loser):
    return f"{winner} computes {percent}% fewer prompt tokens than {loser}"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("hash-16", 1000), ("radix-16", 620)], fewer("radix-16", 38, "hash-16")),
        ([("hash-16", 900), ("radix-1", 1000)], fewer("hash-16", 10, "radix-1")),
        ([("hash-16", 990), ("radix-1", 1000)], "a tie of radix-1 and hash-16, within 2%"),
        (
            [("hash-16", 1000), ("hash-32", 900), ("radix-1", 800), ("whole-16", 1)],
            fewer("radix-1", 11, "hash-32"),  # the best of each side
        ),
        (
            [("hash-16", 10_000), ("radix-1", 6200)],
            fewer("radix-1", 38, "hash-16") + ", which hits nothing",
        ),
        (
            [("hash-16", 10_000), ("hash-32", 12_400, {"hit_tokens": 1}), ("radix-1", 6200)],
            fewer("radix-1", 50, "hash-32"),
        ),
        ([("hash-16", 10_000), ("radix-1", 10_000)], "neither hash nor radix hits anything"),
        ([("hash-16", 10_000), ("radix-1", 9810)], f"{FEW}, 1.9% of the prompt tokens are hit"),
        ([("hash-16", 900), ("radix-1", 500, {"cold": 181})], f"{FEW}, 19 requests hit anything"),
        ([("hash-16", 900), ("radix-1", 500, {"cold": 180})], fewer("radix-1", 44, "hash-16")),
        ([("hash-16", 900, NOT_ALL), ("radix-1", 2500)], "the best scheme, radix-1, hits 75.0%"),
        ([("hash-16", 900, NOT_ALL)], "requests are refused"),
        (
            [("all-kept", 5000), ("ours", 2500), ("vllm", 3000)],
            "the best scheme, ours, hits 75.0%, all-kept 50.0%",
        ),
        ([("all-kept", 2500), ("ours", 2600)], "the best scheme, all-kept, hits 75.0%"),
        (
            [("kv-alone", 500, {"states": 9}), ("sglang", 900), ("ours", 500)],
            "computed of the prompt tokens with 9 states: kv-alone 5.0%, ours 5.0%, sglang 9.0%",
        ),
        ([("ours", 900, NOT_ALL | {"states": 9})], "requests are refused"),
    ],
)
def test_the_headline_says_who_computes_less_and_how_much(rows, said):
    rows = [figures(name, computed, **dict(*more)) for name, computed, *more in rows]
    assert headline(workload(*rows)) == f"30%: {said}."
    rows += [replace(row, memory="9%") for row in rows]
    assert headline(workload(*rows)) == f"30%, 9%: {said}."
    alone = "No prompt begins as one before it does: no scheme can hit anything."
    assert headline(workload(*rows, unlimited_hits=0)) == alone


HALF = {"optimal_hits": {1000: 7000}}


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([("hash-16", 10_000), ("radix-1", 10_000)], {}, "nothing is hit: the requests in flight"),
        ([("hash-64", 10_000), ("radix-1", 9993)], {}, "hash-64 hit nothing: less than a block"),
        ([("radix-1", 10_000)], {"unlimited_hits": 0}, "nothing is hit, because no two prompts"),
        ([("radix-1", 9990, NOT_ALL)], {}, "refused requests do not fit into 1,000 tokens less"),
        ([("radix-1", 9990, {"preemptions": 3})], {}, "too little for the requests in flight (rad"),
        (
            [("hash-16", 8000, {"empty_share": 0.004}), ("radix-16", 8500, {"empty_share": 0.024})],
            {},
            "radix-16 computes more than hash-16: the half-filled pages that it keeps (2.4%",
        ),
        ([("hash-16", 8000), ("radix-1", 7800)], HALF, "no scheme hits half of the optimum"),
        ([("hash-16", 8000), ("radix-1", 1000)], HALF, "radix-1 above the optimum, which serves"),
        ([("radix-1", 8000)], {"footprint": 100}, "these are 1,000 tokens, not 30: all schemes"),
        ([("hash-16", 8000), ("radix-1", 7800)], {"optimal_hits": {1000: 4000}}, None),
    ],
)
def test_what_spoils_figures_is_said_in_words(rows, more, said):
    rows = [figures(name, computed, **dict(*row)) for name, computed, *row in rows]
    more = {"footprint": 3333, "optimal_hits": {1000: 2300}, **more}
    found = remarks(workload(*rows, **more))
    assert len(found) == (said is not None), found
    assert all(line.startswith(f"30%: {said}") for line in found), found


def shown(report, width):
    out = StringIO()
    print_report(report, Console(file=out, width=width, highlight=False))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_tables_are_whole_at_every_width(width):
    """With figures as long as they get: every name, number and remark is there."""
    long = {"cache_us": 123_456.0, "refused": 10_000, "preemptions": 100_000, "memory": "100%"}
    rows = [figures(name, 123_456_789, **long) for name in ("aligned-16", "hash-256")]
    lines = shown(Report({"seed": 0}, [workload(*rows)]), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    cells = "memory|scheme|hit|of optimum|prefilled|cache µs|remark|aligned-16|hash-256|123,456,789"
    for cell in f"{cells}|123,456|10,000 refused,|preempted".split("|"):
        assert cell in text
    assert "…" not in text
    assert "remark" not in "".join(shown(Report({}, [workload(figures("radix-1", 5))]), width))


def test_the_command_prints_tables_and_a_headline_last(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    words = [SMALL[0], "--schemes", "none", "hash-16", "radix-1"]
    assert main(["bench", *words]) == 0
    said = capsys.readouterr()
    *_, last, page = said.out.splitlines()
    assert max(map(len, said.out.splitlines())) == 80
    assert last.startswith("100%: radix-1 computes ") or "100%: radix-1" in said.out
    assert page == "The report is in bench-report.html." and Path("bench-report.html").exists()
    assert said.err == "", "no bar where no terminal shows it"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["bench", *words, "--json", "x.json"]) == 0
    bar = capsys.readouterr().err
    assert "bounds, best-of-n" in bar and "100%, best-of-n" in bar and "\n" not in bar


def test_without_what_draws_pages_the_table_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("radixcache.bench.args.find_spec", lambda name: None)
    assert main(["bench", TINY]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("No report is written: it needs vl-")
    monkeypatch.setattr("radixcache.bench.report.files.find_spec", lambda name: None)
    assert main(["bench", TINY, "--report", "r.html"]) == 2
    assert "a report needs vl-convert" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def cells(page):
    """The text of every cell, by the rows of all tables."""
    rows = re.findall("<tr.*?</tr>", page, re.S)
    return [[unescape(re.sub("<.*?>", "", one)) for one in re.findall(CELL, row)] for row in rows]


@pytest.fixture(scope="module")
def whole():
    """A report of two small workloads in six schemes, one of them with a hostile name."""
    report = cli.measure(
        parsed(*SMALL, "--schemes", *SCHEMES, "--memory", "40%", "100%", "--json", "-")
    )
    report.workloads[1].name = HOSTILE
    report.settings["command"] = f"radixcache bench {HOSTILE}"
    return report


@pytest.fixture(scope="module")
def page(whole):
    return as_html(whole)


def test_the_page_shows_the_figures_of_the_json(whole, page):
    workloads = json.loads(whole.to_json())["workloads"]
    rows = [row for w in workloads for row in w["rows"]]
    assert [row["scheme"] for row in rows] == 4 * SCHEMES
    for row in rows:
        assert row["hit_tokens"] + row["computed_tokens"] >= row["prompt_tokens"] or row["refused"]
    head = [column.title for column in INDEX]
    shown = [row for row in cells(page) if row[0] != "memory"]
    for found, row in zip(shown, rows, strict=True):
        by_title = dict(zip(head, found, strict=False))
        assert (by_title["memory"], by_title["scheme"]) == (row["memory"], row["scheme"])
        assert by_title["hit"] == f"{row['hit_rate']:.1%}"
        names = {"prefilled": "computed_tokens", "cache µs": "cache_us"}
        assert all(by_title[title] == f"{row[name]:,.0f}" for title, name in names.items())


def test_names_are_text_on_a_page_that_loads_nothing(page):
    assert unescape(page).count(HOSTILE) >= 2 and "<script" not in page
    assert not re.search(r"\s(src|srcset|action)=", page)
    assert set(re.findall('href="(.)', page)) == {"#"}
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in page


@pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")
def test_the_plots_are_drawn_and_fit_a_phone(page, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page)
    with browser(tmp_path / "profile") as seen:
        seen.resize(390, 800)
        seen.driver.get(path.as_uri())
        first, *others = seen.all("figure svg.marks")
        assert len(others) == 2 and "hash-16" in first.text and "hash-64" not in first.text
        assert seen.run("return document.documentElement.scrollWidth <= innerWidth")
        assert not seen.driver.get_log("browser")


def test_both_levels_agree_in_the_command_and_refused_everywhere_is_no_error(capsys):
    flags = "--level both --schemes none radix-16 --repeats 1 --memory 2000 32 --json -".split()
    flags += ["--kv-cache-dtype", "int8", "--report", "r.html"]
    assert main(["bench", "short:requests=6,answer=2", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    (found,) = report["workloads"]
    assert report["settings"]["kv_cache_dtype"] == "int8"
    assert found["disagreements"] == 0 and not Path("bench-report.html").exists()
    engine = [row for row in found["rows"] if row["level"] == "engine"]
    assert [row["scheme"] for row in engine] == 2 * ["none", "radix-16"]
    assert all(row["engine"]["ttft_p99"]["median"] > 0 for row in engine[:2])
    assert all(row["engine"] is None and row["refused"] == 6 for row in engine[2:])


def test_a_report_of_a_hybrid_model_has_a_row_for_each_rule(capsys):
    flags = ["--states", "9", "--memory", "100%", "200%", "--json", "-", "--report", "r.html"]
    assert main(["bench", SMALL[1], *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    (workload,) = found["workloads"]
    rules = "kv-alone ours ours-untold marconi sglang sglang-64 vllm-528".split()
    assert found["settings"]["states"] == 9
    assert [row["scheme"] for row in workload["rows"]] == 2 * rules
    head, *rows = cells(Path("r.html").read_text())
    assert head == [column.title for column in STATES[:-1]]
    for shown, row in zip(rows, workload["rows"], strict=True):
        shares = [row["hit_tokens"], row["computed_tokens"]]
        hit, share = (f"{tokens / row['prompt_tokens']:.1%}" for tokens in shares)
        counts = [f"{row[name]:,}" for name in ("computed_tokens", "recomputed_tokens")]
        assert shown == [row["memory"], row["scheme"], "9", hit, share, *counts]
        assert f"{row['scheme']} {share}" in workload["headline"]


def test_a_report_of_a_model_with_windows_says_what_its_rules_are(capsys):
    flags = ["--windows", "gemma-3-27b", "--memory", "100%", "--report", "r.html"]
    assert main(["bench", SMALL[1], *flags]) == 0
    page = unescape(Path("r.html").read_text())
    assert "all-kept: layers with a window keep all KV" in page and "hash-B" not in page
    assert "of optimum" not in page + capsys.readouterr().out, "nothing stands there"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--schemes radix", "no scheme 'radix'; say none, hash-16"),
        ("--schemes none-16", "no scheme 'none-16'"),
        ("--schemes family --level both", "template-16, prefix-16, cow-16: at index level only"),
        ("--memory 0%", "not an amount of memory: '0%'"),
        ("--memory lots", "not an amount of memory: 'lots'"),
        (f"{TINY} --memory {'9' * 23}", "is more than 268,435,456 tokens"),
        (f"{TINY} --memory {'9' * 400}%", "is more than"),
        ("chat:user=" + "9" * 5000, "8 digits at most"),
        ("--concurrency 0", "concurrency must be from 1 to 1000000000000, not 0"),
        ("--step-time nan", "step_time must be from 1e-09 to 1000000000000.0, not nan"),
        ("--rate 1e308 --arrivals poisson", "rate must be from 1e-09 to 1000000000000.0"),
        ("--seed -1", "seed must be at least 0, not -1"),
        ("--file x", "--file and --format go together"),
        ("--level index --kv-cache-dtype int8", "at --level index say --token-bytes"),
        ("--file /nowhere --format mooncake", "cannot read /nowhere"),
        ("--arrivals poisson", "needs a --rate"),
        ("--arrivals trace", "needs a file with times"),
        ("--hash-block 3", "--hash-block goes with a trace only"),
        ("--limit 3", "--limit goes with a --file only"),
        ("--rate 3", "--rate goes with --arrivals poisson only"),
        ("--speed 3", "--speed goes with --arrivals trace only"),
        ("--report x.pdf", "a report ends in .html"),
        ("--report /nowhere/x.html", "cannot write /nowhere/x.html: No such file"),
        ("--json /", "cannot write /: Is a directory"),
        ("--json x.html --report x.html", "--json and --report are one file"),
        ("--memory 30% chat", "chat is a workload: name it before --memory, not after"),
        ("--schemes radix-1 chat:turns=2", "name it before --schemes, not after"),
        ("nothing", "no workload 'nothing'"),
        ("--states 1", "states must be from 2 to 1048576, not 1"),
        ("--states 0", "states must be from 2 to 1048576, not 0"),
        ("--states 9 --level both", "--states are simulated: --level index alone"),
        ("--states 9 --schemes hash-16", "--schemes goes without --states only"),
        ("--windows gemma-3-27b --token-bytes 5", "--windows has its model's own --token-bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(flags, complaint, tmp_path, capsys):
    yesterday = tmp_path / "bench-report.html"
    yesterday.write_text("of yesterday")
    assert main(["bench", *flags.split()]) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.count("\n") == 1 and len(said.err) < 400
    assert not said.out and yesterday.read_text() == "of yesterday"


def test_the_file_that_is_read_is_not_written_over(capsys):
    Path("p.txt").write_text("one\ntwo\n")
    assert main("bench --file p.txt --format prompts --json p.txt".split()) == 2
    assert "--file and --json are one file" in capsys.readouterr().err
    assert Path("p.txt").read_text() == "one\ntwo\n"


def test_a_full_disk_is_told():
    with pytest.raises(InvalidRequest, match="No space left"):
        write(Path("/dev/full"), "x")
