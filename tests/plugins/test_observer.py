"""The plugins' reasons against a brute force, over a cache of whole blocks as vLLM's is.

`make plugins-check` does the same with the real engines.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from bench.peers.plugins.__main__ import expected, is_as_expected
from bench.peers.plugins.chats import Chat, chats
from radixcache import HashBlockCache, PagePool, RadixCache
from radixcache.plugins.observer import Observer, fail_safe, prometheus, summary

CAPACITY = 12_000


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where observers write."""
    monkeypatch.setenv("RADIXCACHE_REPORT", str(tmp_path / "report.jsonl"))
    return tmp_path / "report.jsonl"


def last_misses(report: Path) -> list[list[object]]:
    found: list[list[object]] = json.loads(report.read_text().splitlines()[-1])["misses"]
    return found


def serve(observer: Observer, asked: list[Chat], block: int) -> list[tuple[list[int], int]]:
    """An engine that answers one at a time: answers and hits."""
    cache: HashBlockCache | RadixCache
    if block == 1:
        cache = RadixCache(PagePool(2000, 1))
    else:
        cache = HashBlockCache(PagePool(2000 // block, block))
    told = []
    for number, (tokens, salt) in enumerate(asked):
        lease = cache.acquire(tokens, salt)
        hit = lease.num_tokens
        observer.admit(str(number), tokens, hit, salt)
        answer = [number % 7, 3, 1]
        text = [*tokens, *answer[:-1]]
        cache.reserve(lease, len(text))
        cache.publish(lease, text[hit:], written=True)
        cache.release(lease)
        observer.compute(text, salt)
        told.append((answer, hit))
    return told


@pytest.mark.parametrize("block", [1, 16])
def test_reasons_are_those_of_a_brute_force(block: int, report: Path) -> None:
    observer = Observer("a test", CAPACITY, block)
    asked = chats(72, seed=5)
    told = serve(observer, asked, block)
    head, *lines = map(json.loads, report.read_text().splitlines())
    told_of = {"engine": "a test", "capacity": CAPACITY, "block_size": block}
    assert head.pop("run") and head == told_of
    wanted = expected(asked, told, block)
    seen, texts = set(), list[list[int]]()
    for line, (tokens, _), (answer, hit), stretches in zip(lines, asked, told, wanted, strict=True):
        seen |= {reason for reason, *_ in line["misses"]}
        assert (line["tokens"], line["hit"]) == (len(tokens), hit)
        assert is_as_expected(line["misses"], stretches, tokens, texts)
        texts.append([*tokens, *answer[:-1]])
        missed = sum(end - start for _, start, end in line["misses"])
        assert hit + missed == max(hit, len(tokens) - 1)
        # Nothing was forgotten: everybody's memory holds all of it.
        known = hit + sum(e - s for r, s, e in line["misses"] if r in ("evicted", "block_size"))
        assert line["exact"] == known
        assert line["twice"] == line["fourfold"] == known // block * block
    wanted_reasons = {"first_seen", "diverged", "evicted", "salt", "block_size"}
    assert seen == (wanted_reasons if block > 1 else wanted_reasons - {"block_size"})
    counts = observer.take()
    assert counts["requests"] == 72 and counts["hit_tokens"] == sum(hit for _, hit in told)
    missed = sum(count for name, count in counts.items() if name.startswith("missed_tokens:"))
    assert counts["prompt_tokens"] == counts["hit_tokens"] + missed + 72 - sum(
        hit == len(tokens) for (tokens, _), (_, hit) in zip(asked, told, strict=True)
    )
    assert not observer.take()
    assert summary(counts)["hit"] == f"{counts['hit_tokens'] / counts['prompt_tokens']:.1%}"


def test_what_a_memory_of_each_size_would_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXCACHE_REPORT", raising=False)
    observer = Observer("a test", 10, 2)
    for start in (0, 10, 20, 30):  # ten tokens each: the first text is forgotten by and by
        observer.compute(range(start, start + 10))
        observer.take()
        observer.admit("again", range(9), 0)
        told = observer.take()
        names = ("exact_tokens", "twice_tokens", "fourfold_tokens")
        ages = {0: (8, 8, 8), 10: (0, 8, 8), 20: (0, 0, 8), 30: (0, 0, 8)}
        assert tuple(told[name] for name in names) == ages[start]


def test_who_did_not_look_missed_nothing_else() -> None:
    observer = Observer("a test", 100, 1)
    observer.compute(range(20))
    observer.admit("log-probabilities", range(20), 0, read=False)
    told = observer.take()
    assert told["missed_tokens:not_read"] == 19 and not told["fourfold_tokens"]


def test_of_a_change_only_what_comes_again_is_diverged(report: Path) -> None:
    """The time of day, an instruction that is always the same, a document that is new."""
    observer = Observer("a test", 1000, 1)
    for day in range(2):
        document = range(1000 * (day + 1), 1000 * (day + 1) + 50)
        text = [*range(7 * day, 7 * day + 3), *range(100, 124), *document]
        observer.admit(str(day), text, 0)
        observer.compute(text)
    changed = [["first_seen", 0, 3], ["diverged", 3, 27], ["first_seen", 27, 76]]
    assert last_misses(report) == changed


def test_the_first_salt_is_told_too(report: Path) -> None:
    observer = Observer("a test", 1000, 1)
    observer.compute(range(40))
    observer.admit("salted", range(60), 0, "a")
    assert last_misses(report) == [["salt", 0, 40], ["first_seen", 40, 59]]


def test_prometheus_counts_the_same() -> None:
    for labels in ({}, {"engine": "0"}):
        registry = CollectorRegistry()
        kind = partial(Counter, registry=registry)
        counters: dict[str, Counter] = {}
        for _ in range(2):
            prometheus(kind, counters, {"requests": 2, "missed_tokens:salt": 5}, labels)
        assert registry.get_sample_value("radixcache_requests_total", labels) == 4
        told = {**labels, "reason": "salt"}
        assert registry.get_sample_value("radixcache_missed_tokens_total", told) == 10


def test_a_full_disk_ends_the_file_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RADIXCACHE_REPORT", "/dev/full")
    observer = Observer("a test", 100, 1)
    for _ in range(3):
        observer.admit("one", range(20), 0)
    assert observer.take()["requests"] == 3
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


def test_after_an_error_the_engine_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    class Plugin:
        observer: Observer | None = Observer("a test", 100, 1)

        @fail_safe
        def step(self, request: dict[str, list[int]]) -> None:
            assert self.observer is not None
            self.observer.admit("one", request["tokens"], 0)

    plugin = Plugin()
    plugin.step({"tokens": [1, 2, 3]})
    assert plugin.observer is not None and plugin.observer.counts["requests"] == 1
    for _ in range(3):
        plugin.step({})
    assert plugin.observer is None
    assert [r.levelname for r in caplog.records if r.exc_info] == ["ERROR"]


def test_the_engines_find_the_plugins_and_import_no_torch() -> None:
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        (point,) = entry_points(group=group, name="radixcache")
        assert callable(point.load())
    script = "import sys, radixcache.plugins.observer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
