"""What the JSON lines of a plugin say in all, drawn for a terminal of 80 columns."""

from __future__ import annotations

import argparse
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
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
    "diverged": "diverged, then went on as before",
    "evicted": "evicted",
    "block_size": "lost to the block size",
    "salt": "cached under another salt",
    "not_read": "the request did not look",
}
_COLUMNS = 64


SUMMARY = "why prompts were not cached in vLLM or SGLang, from a plugin's file"


def report(args: argparse.Namespace) -> int:
    """The command."""
    drawn = draw(args.FILE)
    if hasattr(sys.stdout, "reconfigure"):  # bars, where there is ASCII alone
        sys.stdout.reconfigure(errors="replace")
    print(drawn)
    return 0


def draw(path: str) -> str:
    """The report on a file that `RADIXCACHE_REPORT` named. O(lines), 16 bytes each.

    Raises:
        InvalidRequest: it cannot be read, is none, or tells of no request.
    """
    engines, counts, tokens, hits = dict[str, None](), Counter[str](), array("q"), array("q")
    first = last = 0.0
    for line in _lines(path):
        if "engine" in line:
            size, block = line["capacity"], line["block_size"]
            engines[f"{line['engine']}: KV of {size:,} tokens, in blocks of {block}"] = None
            continue
        tokens.append(line["tokens"])
        hits.append(line["hit"])
        first, last = first or line["time"], line["time"]
        counts.update({name: line[name] for name in _WOULD})
        for reason, start, end in line["misses"]:
            counts[reason] += end - start
    total = sum(tokens)
    if not total:
        raise InvalidRequest(f"{path} tells of no request yet")
    lines = [
        *engines,
        f"{len(tokens):,} requests in {last - first:,.0f} s: {total:,} prompt tokens",
    ]
    lines += ["", "Hit rate over time, from the first request to the last", *_curve(tokens, hits)]
    lines += ["", "What is hit, or would be"]
    lines += [_bar(text, counts[name], total) for name, text in _WOULD.items()]
    missed = {text: counts[name] for name, text in _REASONS.items() if counts[name]}
    lines += ["", "Why the rest is computed (each prompt's last token always is)"]
    lines += [
        _bar(text, missed[text], total) for text in sorted(missed, key=missed.__getitem__)[::-1]
    ]
    return "\n".join(lines)


def _lines(path: str) -> Iterator[dict[str, Any]]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith("\n"):  # the engine was killed while it wrote
                    return
                line = _parse(text)
                if line is None:
                    raise InvalidRequest(f"{path}, line {number}, is none of radixcache's plugins")
                yield line
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is no text in UTF-8") from None


def _parse(text: str) -> dict[str, Any] | None:
    """The object in a line, if it is one that an `Observer` writes."""
    try:
        line: dict[str, Any] = json.loads(text)
        if "engine" in line:
            name = line["engine"]
            right = _count(line["capacity"]) and _count(line["block_size"])
            return line if right and name.isprintable() and len(name) <= 40 else None
        tokens, misses = line["tokens"], line["misses"]
        right = _count(tokens) and all(_count(line[name], tokens) for name in _WOULD)
        right = right and math.isfinite(line["time"]) and all(
            reason in _REASONS and _count(end, tokens) and _count(start, end)
            for reason, start, end in misses
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError):
        return None
    return line if right else None


def _count(number: Any, most: int = 1 << 40) -> bool:
    return type(number) is int and 0 <= number <= most


def _curve(tokens: array[int], hits: array[int], height: int = 4) -> list[str]:
    """Columns of equally many requests each."""
    count = min(_COLUMNS, len(tokens))
    edges = [len(tokens) * i // count for i in range(count + 1)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    eighths = [round(8 * height * sum(hits[p]) / max(1, sum(tokens[p]))) for p in parts]
    return [
        ("100 % " if row == height - 1 else "  0 % " if row == 0 else "      ")
        + "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, one - 8 * row))] for one in eighths)
        for row in reversed(range(height))
    ]


def _bar(text: str, count: int, total: int) -> str:
    share = count / total
    return f"  {text:33}{count:>13,}{share:>8.1%}  {'█' * round(22 * share)}"
