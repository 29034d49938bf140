"""`radixcache bench`: its flags, its tables, its JSON and its pages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.columns import INDEX
from radixcache.bench.report.headline import headline
from radixcache.bench.report.pages import as_html
from radixcache.bench.report.results import Report, WorkloadReport, verdicts
from radixcache.bench.report.saved import read_json, to_json
from radixcache.bench.report.sharing import Segment, shared_tree
from radixcache.bench.schemes.bounds import build_trie
from radixcache.bench.workloads.generators import generate
from radixcache.errors import InvalidRequest
from radixcache.runtime.cli import main
from tests.runtime.server.browser import INSTALLED, browser

SMALL = ["bench", "best-of-n:questions=8,n=3", "chat:conversations=3,turns=3,user=20,answer=20"]


def figures(scheme, computed, *, level="index", memory="30%", refused=0, hits=()):
    return Figures(
        level=level,
        workload="w",
        scheme=scheme,
        page_size=16,
        memory=memory,
        memory_tokens=1000,
        requests=200,
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
    return WorkloadReport("w", "shape", 200, 10_000, 100, 5000, 9000, rows=list(rows))


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
        "w, 30%: page for page, hash-16 prefills 1.010x the tokens of radix-16",
        "w, 30%: page for page, hash-16 wastes less: 2.0% of its slots are empty, 20.0% of "
        "radix-16's",
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
    assert "best-of-n:questions=8,n=3" in said and "radix wins" in said
    found = json.loads(data.read_text())
    assert found["settings"]["level"] == "index"
    assert [len(w["rows"]) for w in found["workloads"]] == [6, 6]
    row = found["workloads"][0]["rows"][5]
    assert (
        row["scheme"] == "radix-1"
        and row["hit_tokens"] + row["computed_tokens"] == (found["workloads"][0]["prompt_tokens"])
    )
    assert 'data-scheme="radix-1"' in page.read_text()


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
        (["--report", "x.pdf"], "a report ends in .html"),
        (["--report", "/nowhere/x.html"], "cannot write /nowhere/x.html: No such file"),
        (["--json", "/"], "cannot write /: Is a directory"),
        (["--json", "/nowhere/x"], "cannot write /nowhere/x: No such file"),
        (["--memory", "30%", "chat"], "chat is a workload: name it before --memory, not after"),
        (["--schemes", "radix-1", "chat:turns=2"], "name it before --schemes, not after"),
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
    assert json.loads(to_json(Report({"seed": 0})))["workloads"] == []


def test_a_run_that_is_refused_leaves_the_files_as_they_were(tmp_path, capsys):
    there, fresh = tmp_path / "there.html", tmp_path / "fresh.json"
    there.write_text("of yesterday")
    assert main(["bench", "nothing", "--report", str(there), "--json", str(fresh)]) == 2
    assert "no workload 'nothing'" in capsys.readouterr().err
    assert there.read_text() == "of yesterday" and not fresh.exists()


def test_a_report_without_vl_convert_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("radixcache.bench.report.files.find_spec", lambda name: None)
    assert main(["bench", *SMALL[1:], "--report", str(tmp_path / "r.html")]) == 2
    assert "a report needs vl-convert" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# The headline.


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("hash-16", 1000, "30%"), ("radix-1", 620, "30%")],
            "Radix computes 38 % fewer prompt tokens than blocks of 16 in memory for 30 % of its "
            "distinct tokens.",
        ),
        (
            [("hash-16", 900, "30%"), ("radix-1", 1000, "30%")],
            "Blocks of 16 compute 10 % fewer prompt tokens than radix in memory for 30 % of its "
            "distinct tokens.",
        ),
        (
            [("hash-16", 990, "2GB"), ("radix-1", 1000, "2GB")],
            "Radix and blocks of 16 tie, within 2 %, in 2GB of memory.",
        ),
        (
            [(s, c, m) for m in ("9%", "20%", "50%") for s, c in (("hash-16", 9), ("radix-1", 3))],
            "Radix computes 67 % fewer prompt tokens than blocks of 16 in every size of memory, "
            "for 9 % to 50 % of its distinct tokens.",
        ),
        (
            [("hash-16", 900, "500"), ("radix-1", 300, "500"), ("none", 9000, "60")],
            "Radix computes 67 % fewer prompt tokens than blocks of 16 in 500 tokens of memory.",
        ),
        (
            [("radix-1", 2500, "30%")],
            "The best scheme here, radix-1, hits 75 % of the prompt tokens in memory for 30 % of "
            "its distinct tokens; unlimited memory would hit 90 %.",
        ),
    ],
)
def test_the_headline_says_who_computes_less_and_how_much(rows, said):
    rows = [figures(scheme, computed, memory=memory) for scheme, computed, memory in rows]
    assert headline(workload(*rows)) == said


def test_the_headline_says_where_requests_are_refused_and_where_nothing_is_shared():
    rows = [figures("hash-16", 1000), figures("radix-1", 500)]
    rows += [figures("hash-16", 9, memory="6%", refused=1), figures("radix-1", 9, memory="6%")]
    assert headline(workload(*rows)).endswith(
        "; requests are refused in memory for 6 % of its distinct tokens."
    )
    alone = workload(*rows)
    alone.unlimited_hits = 0
    assert headline(alone) == "No prompt begins as one before it does: no scheme can hit anything."


def rivals(block, tree, memory="30%", **more):
    """A duel, in which `more` is said of both."""
    rows = [figures("hash-16", 10_000 - block), figures("radix-1", 10_000 - tree)]
    return [replace(row, memory=memory, **more) for row in rows]


def test_a_rival_that_hit_nothing_is_not_named():
    found = workload(*rivals(0, 3800), *rivals(1000, 3800, "100%"))
    assert headline(found) == (
        "Only radix hits anything, 38 % of the prompt tokens, in memory for 30 % of its distinct "
        "tokens; radix computes 31 % fewer prompt tokens than blocks of 16 in memory for 100 % of "
        "its distinct tokens."
    )
    only, _ = verdicts(found)
    assert only == "w, 30%: only radix hits anything: radix-1 38.0%"
    assert headline(workload(*rivals(4000, 0))).startswith("Only blocks of 16 hit anything, 40 %")
    preempted = replace(figures("hash-32", 9000), computed_tokens=12_400)
    (said,) = verdicts(workload(*rivals(0, 3800), preempted))
    assert said == "w, 30%: radix wins: hash-32 prefills 2.00x the tokens of radix-1"
    nothing = workload(figures("none", 10_000), figures("radix-1", 10_000))
    assert headline(nothing) == "No scheme here hits anything; unlimited memory would hit 90 %."


@pytest.mark.parametrize(
    ("hits", "more", "said"),
    [
        ((1000, 3800), {"requests": 19}, "19 requests hit anything"),
        ((1000, 3800), {"cold": 170, "refused": 0}, None),
        ((1000, 3800), {"cold": 181}, "19 requests hit anything"),
        ((0, 190), {}, "1.9 % of the prompt tokens hit"),
    ],
)
def test_too_little_data_is_no_verdict(hits, more, said):
    found = workload(*rivals(*hits, **more))
    if said is None:
        assert headline(found).startswith("Radix computes 31 % fewer")
        return
    assert headline(found) == (
        f"Too little data for a verdict ({said}) in memory for 30 % of its distinct tokens."
    )
    assert verdicts(found) == [f"w, 30%: too little data for a verdict: {said}"]


def test_too_few_requests_say_nothing_of_ways_to_route(tmp_path, capsys):
    flags = ["--replicas", "2", "--json", str(tmp_path / "r.json"), "--memory", "100%"]
    assert main(["bench", "best-of-n:questions=5,n=3", *flags]) == 0
    assert "Too little data to compare ways to route: 15 requests." in capsys.readouterr().out


# Files.


class Tags(HTMLParser):
    """The attributes of every element, and the cells of every row of a table."""

    def __init__(self, page):
        super().__init__()
        self.found, self.rows, self.text = [], [], []
        self.cell = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.cell = self.cell or tag in ("td", "th")

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text.append(data)
        if self.cell:
            self.rows[-1][-1] += data


HOSTILE = "</script><script>alert('1')</script> & \"quoted\""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report of two small workloads in six schemes, one of them with a hostile name."""
    path = tmp_path_factory.mktemp("report") / "whole.json"
    flags = ["--schemes", "none", "hash-16", "hash-32", "hash-64", "radix-1", "aligned-16"]
    assert main([*SMALL, *flags, "--memory", "40%", "100%", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    found["workloads"][1]["name"] = HOSTILE
    found["settings"]["command"] = f"radixcache bench {HOSTILE}"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture(scope="module")
def page(whole):
    return as_html(read_json(whole))


def test_the_page_shows_the_figures_of_the_json(whole, page):
    rows = [row for row in Tags(page).rows if row[0] != "memoryfor KV"]
    found = [row for w in json.loads(whole.read_text())["workloads"] for row in w["rows"]]
    assert len(rows) == len(found) == 24
    for cells, row in zip(rows, found, strict=True):
        assert cells[:2] == [row["memory"], row["scheme"]]
        assert cells[2].endswith(f"{row['hit_rate']:.1%}")
        assert (f"{row['preemptions']:,} preempted" in cells[2]) == (row["preemptions"] > 0)
        assert cells[5:8] == [
            f"{row[name]:,}" for name in ("computed_tokens", "doubled_tokens", "evicted_tokens")
        ]
        assert cells[8] == f"{row['peak_used_pages']:,}" and cells[10] == f"{row['cache_us']:,.0f}"


def test_the_page_explains_its_columns_and_loads_nothing(page):
    tags = Tags(page)
    titles = [attrs["title"] for tag, attrs in tags.found if tag == "abbr"]
    assert titles == [column.note for column in INDEX] * 2
    assert not [attrs for _, attrs in tags.found if attrs.keys() & {"src", "srcset", "action"}]
    assert all(a["href"].startswith("#") for _, a in tags.found if "href" in a)
    (policy,) = [a["content"] for _, a in tags.found if "http-equiv" in a]
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_hostile_names_are_text(page):
    tags = Tags(page)
    assert [tag for tag, _ in tags.found].count("script") == 3
    assert tags.text.count(HOSTILE) >= 2 and f"radixcache bench {HOSTILE}" in tags.text


def test_a_report_comes_back_from_its_json(whole, page):
    report = read_json(whole)
    again = whole.with_name("again.json")
    again.write_text(to_json(report))
    assert read_json(again) == report and as_html(read_json(again)) == page
    assert to_json(read_json(again)) == to_json(report)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no report of radixcache bench"),
        ("[]", "is no report of radixcache bench"),
        ('{"settings": {}}', "is no report of radixcache bench"),
        ('{"format": 1, "settings": {}, "workloads": [{"name": 5}]}', "is no report"),
        ('{"format": 1, "settings": [], "workloads": []}', "is no report"),
        ('{"format": 99}', "is a report of format 99, and this reads 1"),
        ("[" * 100_000, "is no report of radixcache bench"),
    ],
)
def test_what_is_no_report_is_not_read(text, complaint, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        read_json(path)


# What is shared.


@pytest.mark.parametrize("most", [1, 5, 40, 10_000])
def test_the_tree_of_what_is_shared_has_every_token_of_every_request(most):
    requests = generate("tree-search:problems=3", 1, 500)
    trie = build_trie(requests)
    found = shared_tree(trie, most)
    assert sum(s.folded == 1 for s in found) >= min(most, len(trie.lengths))
    assert sum(s.folded for s in found) == len(trie.lengths)
    total = sum(arrival.kv_tokens for arrival in requests.arrivals)
    assert sum(s.tokens * s.requests for s in found) == pytest.approx(total)
    for segment in found:
        if segment.parent >= 0:
            above: Segment = found[segment.parent]
            assert segment.start == above.start + above.tokens


@pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")
def test_the_plots_are_drawn_and_the_legend_shows_what_is_hidden(page, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page)
    with browser(tmp_path / "profile") as seen:
        seen.resize(390, 800)
        seen.driver.get(path.as_uri())
        count = len(re.findall("data-plot=", page))
        seen.until(lambda: len(seen.all(".plot svg.marks")) == count == 5)
        lines = "section .plot .mark-line path[aria-label*='hash-64']"
        points = "#w0 .plot .mark-symbol path[aria-label*='hash-64']"
        row = "return document.querySelector('#w1 [data-scheme=hash-64]').hidden"
        assert not seen.all(points) and not seen.all(lines) and seen.run(row)
        seen.one("#w1 input[value=hash-64]").click()
        seen.until(lambda: len(seen.all(points)) >= 2)
        assert not seen.run(row) and seen.one("#w0 input[value=hash-64]").is_selected()
        assert seen.run("return document.documentElement.scrollWidth <= innerWidth")
        assert not seen.driver.get_log("browser")


def test_a_report_of_replicas_has_their_table_and_comes_back(tmp_path, capsys):
    data, page = tmp_path / "r.json", tmp_path / "r.html"
    flags = ["--replicas", "2", "--memory", "100%", "--json", str(data), "--report", str(page)]
    assert main([*SMALL[:2], *flags]) == 0
    report = read_json(data)
    found = report.workloads[0].routing
    rows = Tags(page.read_text()).rows[1:]
    assert [cells[3] for cells in rows] == [row.routing for row in found] and found
    for cells, row in zip(rows, found, strict=True):
        assert cells[2] == f"{row.hit_rate:.1%}" and cells[4] == f"{row.computed_tokens:,}"
        assert cells[5] == f"{1000 * row.ttft_mean:,.0f}" and row.ttft_mean > 0
    best = min(found, key=lambda row: row.ttft_mean)
    assert headline(report.workloads[0]).startswith(f"Routed by {best.routing}, ")
    assert as_html(report) == page.read_text()
