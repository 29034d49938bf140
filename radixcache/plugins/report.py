"""Sums up the JSON lines of a plugin, and draws them for a terminal of 80 columns."""

from __future__ import annotations

import argparse
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from radixcache.errors import InvalidRequest

_WOULD = {
    "hit": "as it is",
    "exact": "token-exact, in the same memory",
    "twice": "in twice the memory",
    "fourfold": "in four times the memory",
}
_REASONS = {
    "first_seen": "first seen",
    "diverged": "same as before, after a change",
    "evicted": "evicted",
    "block_size": "lost to the block size",
    "salt": "cached under another salt",
    "not_read": "the request did not look",
}
_COLUMNS, _HEIGHT = 64, 4
_BLOCKS = " ▏▎▍▌▋▊▉█"
_ASCII = str.maketrans("▁▂▃▄▅▆▇█▏▎▍▌▋▊▉", "....####....###")

SUMMARY = "why prompts were not cached in vLLM or SGLang, from a plugin's file"


def report(args: argparse.Namespace) -> int:
    """The command `radixcache report`."""
    drawn = draw(args.FILE)
    try:
        drawn.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        drawn = drawn.translate(_ASCII)
    print(drawn)
    return 0


@dataclass
class _Engine:
    """Sums over the runs of one engine with one cache, in 16 bytes a request."""

    runs: int = 0
    first: float = math.inf
    last: float = -math.inf
    counts: Counter[str] = field(default_factory=Counter)
    tokens: array[int] = field(default_factory=lambda: array("q"))
    hits: array[int] = field(default_factory=lambda: array("q"))

    def add(self, line: dict[str, Any]) -> None:
        self.tokens.append(line["tokens"])
        self.hits.append(line["hit"])
        self.first, self.last = min(self.first, line["time"]), max(self.last, line["time"])
        self.counts.update({name: line[name] for name in _WOULD})
        for reason, start, end in line["misses"]:
            self.counts[reason] += end - start

    def draw(self, name: str) -> list[str]:
        total, counts = sum(self.tokens), self.counts
        starts = f", {self.runs} starts" if self.runs > 1 else ""
        lines = [f"{name}{starts}"]
        lines.append(
            f"{len(self.tokens):,} requests in {self.last - self.first:,.0f} s: "
            f"{total:,} prompt tokens"
        )
        lines += ["", "Hit rate, from the first request to the last"]
        lines += _curve(self.tokens, self.hits)
        lines += ["", "What is hit, or would be"]
        lines += [_bar(text, counts[name], total) for name, text in _WOULD.items()]
        missed = {text: counts[name] for name, text in _REASONS.items() if counts[name]}
        lines += ["", "Why the rest is computed (each prompt's last token always is)"]
        order = sorted(missed, key=missed.__getitem__, reverse=True)
        return lines + [_bar(text, missed[text], total) for text in order]


def draw(path: str) -> str:
    """The report on a file that `RADIXCACHE_REPORT` named, engine by engine. O(lines).

    Raises:
        InvalidRequest: the file cannot be read, is not a plugin's, or has no requests.
    """
    engines, runs, torn = dict[str, _Engine](), dict[str, _Engine](), 0
    for number, line in _lines(path):
        if line is None and runs:
            torn += 1  # a process was killed, or the disk was full; another one went on
        elif line is not None and "engine" in line and _is_head(line):
            name = f"{line['engine']}: KV of {line['capacity']:,} tokens"
            name += f", in blocks of {line['block_size']}"
            runs[line["run"]] = engines.setdefault(name, _Engine())
            engines[name].runs += 1
        elif line is not None and "engine" not in line and _is_request(line, runs):
            runs[line["run"]].add(line)
        else:
            raise InvalidRequest(f"{path}, line {number}, is none of radixcache's plugins")
    drawn = [engine.draw(name) for name, engine in engines.items() if sum(engine.tokens)]
    if not drawn:
        raise InvalidRequest(f"{path} tells of no request yet")
    if torn:
        drawn.append([f"{torn} lines were cut off, and are left out."])
    return "\n\n\n".join("\n".join(lines) for lines in drawn)


def _lines(path: str) -> Iterator[tuple[int, Any]]:
    """Numbered lines; None for one that is no JSON object, but not for what a kill left last."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith("\n"):
                    return
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    line = None
                yield number, line if isinstance(line, dict) else None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is no text in UTF-8") from None


def _is_head(line: dict[str, Any]) -> bool:
    name, run = line["engine"], line.get("run")
    named = isinstance(run, str) and isinstance(name, str) and name.isprintable() and len(name) < 40
    return named and _count(line.get("capacity")) and _count(line.get("block_size"))


def _is_request(line: dict[str, Any], runs: dict[str, _Engine]) -> bool:
    try:
        tokens, at, misses = line["tokens"], line["time"], line["misses"]
        known = line["run"] in runs and math.isfinite(at) and _count(tokens)
        return known and all(_count(line[name], tokens) for name in _WOULD) and all(
            reason in _REASONS and _count(end, tokens) and _count(start, end)
            for reason, start, end in misses
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _count(number: Any, most: int = 1 << 40) -> bool:
    return type(number) is int and 0 <= number <= most


def _curve(tokens: array[int], hits: array[int]) -> list[str]:
    """A curve of hit rates, each column over equally many requests."""
    count = min(_COLUMNS, len(tokens))
    edges = [len(tokens) * i // count for i in range(count + 1)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    eighths = [round(8 * _HEIGHT * sum(hits[p]) / max(1, sum(tokens[p]))) for p in parts]
    names = {_HEIGHT - 1: "100 % ", 0: "  0 % "}
    return [
        names.get(row, " " * 6)
        + "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, one - 8 * row))] for one in eighths).rstrip()
        for row in reversed(range(_HEIGHT))
    ]


def _bar(text: str, count: int, total: int) -> str:
    share = count / total
    full, eighths = divmod(round(8 * 22 * share), 8)
    bar = "█" * full + _BLOCKS[eighths].strip()
    return f"  {text:33}{count:>13,}{share:>8.1%}  {bar}".rstrip()
