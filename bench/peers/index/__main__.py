"""Our index against the real indexes of SGLang and vLLM, side by side.

    make bench-index
    make bench-index ARGS="--quick"
    make bench-index ARGS="--only match evict --json /tmp/index.json"

Every library runs in processes of its own, in its own environment, and they take turns round by
round: same tokens, same pool, same operations, so that what the machine does meanwhile hits all of
them. Times are thread CPU time, medians. A library that cannot be loaded is named and left out.
`docs/index-benchmark.md` says what each row drives, and what it does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.index.trace_t import TraceT, replay_all
from bench.peers.index.trace_t_lru import TokenLRU
from bench.peers.process import Worker
from radixcache.bench.machine import conditions

LIBRARIES = {"ours": ".venv", "sglang": ".venv-sglang", "vllm": ".venv-vllm"}

BLOCK = 16
"""vLLM's page size in every row: it appears once, in the rows of page 16 if there are any."""

MICRO = ("ours", "sglang-rust", "sglang-python", "vllm")
TRACE = ("ours", "ours-token", "sglang-rust", "sglang-rust-once", "sglang-python")


@dataclass
class Row:
    """One line of the table: a case with its parameters."""

    title: str
    case: str
    params: dict[str, Any]
    rounds: int
    contenders: tuple[str, ...] = MICRO
    page_size: int = 1


@dataclass
class Result:
    """What one contender did in one row."""

    row: Row
    contender: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    found: int | None = None
    """Tokens found, where the row looks something up."""

    @property
    def value(self) -> float | None:
        """Median microseconds, or bytes per token."""
        if self.error or not self.rounds:
            return None
        if "bytes" in self.rounds[0]:
            return statistics.median(r["bytes"] / r["tokens"] for r in self.rounds)
        if "phases" in self.rounds[0]:
            return statistics.median(per_request(self.rounds))
        return statistics.median(ns for r in self.rounds for ns in r["ns"]) / 1000


def per_request(rounds: list[dict[str, Any]]) -> list[float]:
    """Microseconds per request of each segment of a trace."""
    ends = [0] + [r["requests"] for r in rounds]
    return [
        sum(r["phases"].values()) / 1000 / (end - start)
        for r, start, end in zip(rounds, ends, ends[1:], strict=False)
    ]


def rows(args: argparse.Namespace) -> list[Row]:
    """The table that was asked for."""
    quick, table = args.quick, []
    turns = 5 if quick else 15
    for page in args.pages:
        suffix = f", page {page}"
        for length, node in ((1024, 0), (8192, 512), (32768, 512), (131072, 0), (131072, 512)):
            nodes = f"{node}-token nodes" if node else "one node"
            params = {"length": length, "node": node}
            title = f"match {length // 1024}k, {nodes}{suffix}"
            table.append(Row(title, "match", params, turns, page_size=page))
        for node in (0, 512):
            nodes = f"{node}-token nodes" if node else "one node"
            params = {"length": 131072, "node": node, "borrow": True}
            title = f"match + lock + pages + unlock 128k, {nodes}{suffix}"
            table.append(Row(title, "match", params, turns, page_size=page))
        params = {"cached": 8192, "new": 8192, "rounds": turns * 3}
        title = f"insert 8k below 8k cached{suffix}"
        table.append(Row(title, "insert", params, turns * 3, page_size=page))
        for leaves in (1000, 10_000) if quick else (1000, 10_000, 100_000):
            params = {"leaves": leaves, "at_once": 1, "times": 5}
            title = f"evict one of {leaves:,} leaves{suffix}"
            table.append(Row(title, "evict", params, turns, page_size=page))
        leaves = 10_000 if quick else 100_000
        params = {"leaves": leaves, "at_once": leaves // 10, "times": 1}
        title = f"evict a tenth of {leaves:,} leaves, per leaf{suffix}"
        table.append(Row(title, "evict", params, 5, page_size=page))
        params = {"length": 131072, "chunks": 64, "rounds": 5}
        title = f"prefill 128k in 64 chunks, whole request{suffix}"
        table.append(Row(title, "chunked", params, 5, page_size=page))
    for length in (8192, 131072):
        title = f"convert a list of {length // 1024}k tokens, at the boundary"
        table.append(Row(title, "convert", {"length": length}, turns))
    for page in args.pages:
        for leaves, length in ((20_000, 32), (2000, 2048)):
            params = {"leaves": leaves, "length": length}
            title = f"host bytes per token, {length}-token leaves, page {page}"
            table.append(Row(title, "memory", params, 1, page_size=page))
    for page in args.pages:
        conversations = 100 if quick else 500
        params = {"conversations": conversations, "segment": conversations // 2}
        contenders = (*TRACE, "vllm")
        title = f"trace T, per request, page {page}"
        table.append(Row(title, "trace_t", params, 10**9, contenders, page))
    for row in table:
        if row.page_size != BLOCK and BLOCK in args.pages and row.case != "convert":
            row.contenders = tuple(name for name in row.contenders if name != "vllm")
    return [row for row in table if not args.only or row.case in args.only]


class Workers:
    """One process per contender, kept from row to row; a library that fails is named once."""

    def __init__(self, left_out: Iterable[str]) -> None:
        self.left_out = set(left_out)
        self.versions: dict[str, str] = {}
        self._workers: dict[str, Worker] = {}

    def of(self, contender: str, *, fresh: bool = False) -> Worker | None:
        """The contender's process, with `fresh` a new one; None if its library is left out."""
        library = contender.partition("-")[0]
        if library in self.left_out:
            return None
        if contender in self._workers and not fresh:
            return self._workers[contender]
        worker = Worker(
            LIBRARIES[library],
            "bench-index",
            "bench.peers.index.worker",
            contender,
            GOMP_SPINCOUNT="1000",
        )
        if worker.error:
            self.left_out.add(library)
            print(f"{library} is left out: {worker.error}.", flush=True)
            return None
        self.versions[library] = worker.version
        if not fresh:
            self._workers[contender] = worker
        return worker

    def close(self) -> None:
        """End them all."""
        for worker in self._workers.values():
            worker.close()


def run(row: Row, seed: int, workers: Workers) -> list[Result]:
    """One row: every contender set up, then round by round in turn."""
    active: list[tuple[Worker, Result]] = []
    for contender in row.contenders:
        worker = workers.of(contender, fresh=row.case == "memory")
        if worker is None:
            continue
        result = Result(row, contender)
        page_size = BLOCK if contender == "vllm" else row.page_size
        answer = worker.ask({"case": row.case, "seed": seed, "page_size": page_size, **row.params})
        result.error = answer.get("error", "")
        result.found = answer.get("found") if not row.params.get("borrow") else None
        active.append((worker, result))
        if row.case == "memory":
            result.rounds.append(answer)
            worker.close()
    if row.case != "memory":
        take_turns([pair for pair in active if not pair[1].error], row.rounds)
    return [result for _, result in active]


def take_turns(active: list[tuple[Worker, Result]], rounds: int) -> None:
    """Ask one contender after the other for a round, until all have had theirs."""
    for _ in range(rounds):
        for worker, result in list(active):
            answer = worker.ask({})
            result.error = answer.get("error", "")
            if "end" in answer or result.error:
                active.remove((worker, result))
            else:
                result.rounds.append(answer)
        if not active:
            break
    for worker, _ in active:
        worker.ask({"case": "nothing"})  # what the last case held is gone before the next


def print_row(row: Row, results: Iterable[Result]) -> None:
    """One line per contender: the value, and ours over it."""
    by_name = {result.contender: result for result in results}
    ours = by_name["ours"].value if "ours" in by_name else None
    unit = "B" if row.case == "memory" else "µs"
    print(f"\n{row.title}")
    for name, result in by_name.items():
        if result.value is None:
            print(f"  {name:18} failed: {result.error}")
            continue
        ratio = f"ours is {ours / result.value:7.3f} x" if ours and name != "ours" else ""
        print(f"  {name:18}{result.value:12,.1f} {unit}  {ratio:20}{details(row, result)}")
    found = [result.found for result in by_name.values() if result.found is not None]
    if found and max(found) - min(found) >= BLOCK:
        print(f"  NOT COMPARABLE: they found {found} tokens")
    sys.stdout.flush()


def details(row: Row, result: Result) -> str:
    """What a trace's cost consists of, and its hit rate."""
    if row.case != "trace_t":
        return ""
    last = result.rounds[-1]
    total: dict[str, float] = {}
    for one in result.rounds:
        for phase, ns in one["phases"].items():
            total[phase] = total.get(phase, 0.0) + ns / 1000 / last["requests"]
    parts = ", ".join(f"{phase} {us:.0f}" for phase, us in total.items())
    rate = last["hit_tokens"] / last["prompt_tokens"]
    return f"mean {sum(total.values()):.0f} ({parts}); hits {rate:.4f}"


def check_hits(results: list[Result], seed: int) -> bool | None:
    """Whether our hits at page 1 are those of an exact LRU, token by token; None if not run."""
    for result in results:
        row = result.row
        if (row.case, row.page_size, result.contender) != ("trace_t", 1, "ours-token"):
            continue
        if result.error:
            return None
        trace = TraceT(seed=seed, conversations=row.params["conversations"])
        exact = replay_all(trace, TokenLRU(trace))
        found = result.rounds[-1]["hit_tokens"]
        equal = found == exact.hit_tokens
        verdict = "equal" if equal else "DIFFERENT"
        print(
            f"\nhits on trace T, page 1: ours-token {found:,}, brute-force LRU "
            f"{exact.hit_tokens:,} of {exact.prompt_tokens:,} tokens ({exact.rate:.4f}): {verdict}"
        )
        return equal
    return None


TARGETS = (
    ("trace T, per request, page 1", "ours", "sglang-rust", 0.5),
    ("trace T, per request, page 1", "ours", "sglang-rust-once", 0.5),
    ("trace T, per request, page 16", "ours", "sglang-rust", 0.5),
    ("trace T, per request, page 16", "ours", "vllm", 0.06),
    ("match 8k, 512-token nodes, page 1", "ours", "sglang-rust", 1.0),
    ("match 128k, one node, page 1", "ours", "sglang-rust", 0.4),
    ("match 128k, 512-token nodes, page 1", "ours", "sglang-rust", 0.4),
    ("evict one of 100,000 leaves, page 1", "ours", "sglang-rust", 0.02),
)
"""(row, ours, theirs, the most that ours may be of theirs)"""


def print_targets(results: list[Result]) -> None:
    """Each target and what was measured."""
    values = {(r.row.title, r.contender): r.value for r in results}
    lines = []
    for title, ours, theirs, limit in TARGETS:
        a, b = values.get((title, ours)), values.get((title, theirs))
        if a and b:
            lines.append((a / b, limit, f"{title}: {ours} / {theirs}"))
    few = values.get(("evict one of 1,000 leaves, page 1", "ours"))
    many = values.get(("evict one of 100,000 leaves, page 1", "ours"))
    if few and many:
        lines.append((many / few, 1.5, "evict one leaf, page 1: ours at 100,000 / at 1,000"))
    size = values.get(("host bytes per token, 2048-token leaves, page 16", "ours"))
    if size:
        lines.append((size, 6.0, "host bytes per token, 2048-token leaves, page 16: ours"))
    print("\ntargets")
    for value, limit, text in lines:
        print(f"  {'met   ' if value <= limit else 'MISSED'} {value:8.3f} <= {limit:<6} {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16], help="page sizes (1 16)")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="match, insert, evict, ...")
    parser.add_argument("--without", nargs="+", default=[], choices=["sglang", "vllm"])
    parser.add_argument("--quick", action="store_true", help="smaller trees and traces")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there, too")
    args = parser.parse_args()

    print(f"seed {args.seed}; {conditions()}")
    workers = Workers(args.without)
    results: list[Result] = []
    for row in rows(args):
        found = run(row, args.seed, workers)
        results += found
        print_row(row, found)
    equal = check_hits(results, args.seed)
    print_targets(results)
    workers.close()
    libraries = ", ".join(f"{name} {version}" for name, version in workers.versions.items())
    print(f"\n{libraries}; {conditions()}")
    if args.json:
        args.json.write_text(
            json.dumps(
                [
                    {"row": r.row.title, "contender": r.contender, "rounds": r.rounds}
                    for r in results
                ]
            )
        )
    sys.exit(equal is False)


if __name__ == "__main__":
    main()
