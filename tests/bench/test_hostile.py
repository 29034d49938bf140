"""What once broke `radixcache bench`: hostile files, names and numbers, and places to write to."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from radixcache.bench.replay.figures import summarise
from radixcache.bench.replay.play import Outcome
from radixcache.bench.replay.replicas import RoutingFigures
from radixcache.bench.report.files import write
from radixcache.bench.report.headline import headline
from radixcache.bench.report.pages import as_html
from radixcache.bench.report.results import Report, WorkloadReport
from radixcache.bench.report.terminal import print_report
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.tables import console
from radixcache.bench.workloads import loaders
from radixcache.bench.workloads.workload import Workload
from radixcache.errors import InvalidRequest
from radixcache.runtime.cli import main

TINY = "chat:conversations=2,turns=2,user=4,answer=4,system=40"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where a report by default is written."""
    monkeypatch.chdir(tmp_path)


def ends(words, capsys):
    """The one sentence with which a command is refused."""
    assert main(["bench", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("radixcache: error: ") and said.err.count("\n") == 1
    assert not said.out and len(said.err) < 400
    return said.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([TINY, "--memory", "9" * 23], "is more than 268,435,456 tokens"),
        ([TINY, "--memory", "9" * 400], "is more than"),
        ([TINY, "--memory", "9" * 400 + "%"], "is more than"),
        (["chat:user=" + "9" * 20], "8 digits at most"),
        (["chat:user=" + "9" * 5000], "8 digits at most"),
        ([TINY, "--replicas", "2", "--prefill-rate", "1e-308"], "must be from 1e-09 to 1e+12"),
        ([TINY, "--step-time", "1e308"], "must be from 1e-09 to 1e+12"),
        ([TINY, "--json", "x.html", "--report", "x.html"], "--json and --report are one file"),
        ([TINY, "--hash-block", "3"], "--hash-block goes with a trace only"),
        ([TINY, "--limit", "3"], "--limit goes with a --file only"),
        ([TINY, "--rate", "3"], "--rate goes with --arrivals poisson only"),
        ([TINY, "--speed", "3"], "--speed goes with --arrivals trace only"),
    ],
)
def test_numbers_and_places_that_make_no_sense_get_one_sentence(words, complaint, capsys):
    assert complaint in ends(words, capsys)


@pytest.mark.parametrize("digits", [16, 400])
def test_a_time_too_late_to_be_exact_is_named(digits, tmp_path, capsys):
    record = {
        "timestamp": int("9" * digits),
        "input_length": 4,
        "output_length": 1,
        "hash_ids": [1],
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    assert "a time must be" in ends(["--file", "t.jsonl", "--format", "mooncake"], capsys)


def test_the_file_that_is_read_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n")
    words = ["--file", "p.txt", "--format", "prompts", "--json", str(path)]
    assert "--file and --json are one file" in ends(words, capsys)
    assert path.read_text() == "one\ntwo\n"


def test_lines_may_end_as_in_windows(tmp_path):
    unix, windows = tmp_path / "u.txt", tmp_path / "w.txt"
    unix.write_bytes(b"one two\nthree\n")
    windows.write_bytes(b"one two\r\nthree\r\n")
    first, second = (
        loaders.load_prompts(path, lambda text: list(text.encode())) for path in (unix, windows)
    )
    for a, b in zip(first.arrivals, second.arrivals, strict=True):
        assert np.array_equal(a.prompt(), b.prompt())


def test_a_full_disk_leaves_the_file_of_yesterday_and_nothing_beside_it(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("of yesterday")
    path.chmod(0o640)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(InvalidRequest, match="File too large"):
            write(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "of yesterday" and [*tmp_path.iterdir()] == [path]
    write(path, "of today")
    assert path.read_text() == "of today" and path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed_and_a_device_written(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    write(link, "x")
    assert link.is_symlink() and (tmp_path / "real").read_text() == "x"
    with pytest.raises(InvalidRequest, match="No space left"):
        write(Path("/dev/full"), "x")


@pytest.mark.parametrize("name", ["[red].txt", "a\nb\x1b[31m.txt", "a\udcff.txt", "=1+1.txt"])
def test_a_file_may_have_any_name(name, tmp_path, capsys):
    (tmp_path / name).write_text("one two three\none two\n")
    outs = ["--json", "f.json", "--report", "f.html"]
    words = ["--schemes", "radix-1", "--file", name, "--format", "prompts"]
    assert main(["bench", *words, *outs]) == 0
    assert "\x1b" not in capsys.readouterr().out


def routed(refused, ttfts):
    return RoutingFigures("w", "cost", "radix-16", "30%", 64, refused, 1, 1, ttfts, [1, 0])


def test_replicas_that_refused_are_not_the_fastest():
    found = WorkloadReport("w", "", 64, 10, 5, 9, 4, routing=[routed(2, []), routed(0, [3.0])])
    assert "after 3,000 ms" in headline(found)
    assert as_html(Report({}, [found]))
    assert "fastest that ignores" not in headline(found)
    del found.routing[1]
    assert headline(found).startswith("Requests were refused everywhere")


def test_what_routing_is_worth_is_said_beside_the_best_way_that_ignores_caches(capsys):
    def way(name, ttft, hit, memory="30%"):
        return RoutingFigures("w", name, "radix-16", memory, 64, 0, hit, 10 - hit, [ttft], [1, 0])

    rows = [way("random", 0.09, 1), way("least-queued", 0.05, 2), way("session", 0.02, 7)]
    rows += [way("sglang", 0.00435, 9), way("cost", 0.0043, 9), way("random", 0.01, 9, "100%")]
    found = WorkloadReport("w", "", 64, 10, 5, 9, 4, routing=rows)
    print_report(Report({}, [found]), console())
    assert " ".join(capsys.readouterr().out.split()).count(headline(found)) == 1
    assert headline(found) == (
        "Routed by cost, requests have their first token earliest, after 4.3 ms in the mean, and "
        "hit 90 % of the prompt tokens (sglang within 2 %); by least-queued, the fastest that "
        "ignores what is shared, after 50 ms, and 20 %."
    )
    assert "<title>Prefix caching: ways to route</title>" in as_html(Report({}, [found]))


def test_refused_requests_lower_no_mean():
    outcomes = [
        Outcome(10, 0, computed_tokens=10),
        Outcome(10, 0, error="too long"),
        Outcome(10, 1, error="too long"),
    ]
    more = {"memory": "", "level": "index", "evicted_tokens": 0, "seconds": 0.0}
    found = summarise(outcomes, Workload("w", ""), parse_scheme("radix-1"), 8, **more)
    assert found.computed_by_turn == [10.0, 0.0] and found.cold == 1 and found.refused == 2
