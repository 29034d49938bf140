"""Our index against the real indexes of SGLang and vLLM, side by side.

    make bench-index
    make bench-index ARGS="--quick"
    make bench-index ARGS="--only match evict --json /tmp/index.json"

Every library runs in processes of its own, in its own environment, and they take turns round by
round: same tokens, same pool, same operations, so that what the machine does meanwhile hits all of
them. Times are thread CPU time, medians. A library that cannot be loaded is named and left out.
`docs/benchmarks.md` says what each row drives, and what it does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.process import Worker
from radixcache.bench.machine import conditions
from radixcache.bench.tables import console, table

LIBRARIES = {"ours": ".venv", "sglang": ".venv-sglang", "vllm": ".venv-vllm"}

BLOCK = 16
"""vLLM's page size in every row: it appears once, in the rows of page 16 if there are any."""

MICRO = ("ours", "sglang-rust", "sglang-python", "vllm")
TRACE = (
    "ours",
    "ours-token",
    "sglang-rust",
    "sglang-rust-once",
    "sglang-python",
    "vllm",
)


@dataclass
class Row:
    """One row: a case with its parameters."""

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
        if self.row.case == "memory":
            return median(r["bytes"] / r["tokens"] for r in self.rounds)
        if self.row.case == "trace_t":
            ends = [0] + [r["requests"] for r in self.rounds]
            return median(
                sum(r["phases"].values()) / 1000 / (end - start)
                for r, start, end in zip(self.rounds, ends, ends[1:], strict=False)
            )
        return median(ns for r in self.rounds for ns in r["ns"]) / 1000

    @property
    def details(self) -> str:
        """What a trace's cost consists of, and its hits."""
        if self.row.case != "trace_t" or self.value is None:
            return ""
        last = self.rounds[-1]
        parts = {
            phase: sum(r["phases"].get(phase, 0) for r in self.rounds) / 1000 / last["requests"]
            for phase in dict.fromkeys(phase for r in self.rounds for phase in r["phases"])
        }
        hits, prompts = last["hit_tokens"], last["prompt_tokens"]
        return (
            f"mean {sum(parts.values()):.0f} "
            f"({', '.join(f'{phase} {us:.0f}' for phase, us in parts.items())}); "
            f"hits {hits:,} of {prompts:,}, {hits / prompts:.4f}"
        )


def rows(args: argparse.Namespace) -> list[Row]:
    """The rows that were asked for."""
    found: list[Row] = []

    def add(
        title: str,
        case: str,
        rounds: int,
        contenders: tuple[str, ...] = MICRO,
        /,
        pages: Sequence[int] = args.pages,
        **params: Any,
    ) -> None:
        for page in pages if not args.only or case in args.only else ():
            with_vllm = page == BLOCK or BLOCK not in pages
            named = tuple(name for name in contenders if name != "vllm" or with_vllm)
            found.append(Row(f"{title}, page {page}", case, params, rounds, named, page))

    turns = 5 if args.quick else 15
    nodes = {0: "one node", 512: "512-token nodes"}
    for length, node in ((1024, 0), (8192, 512), (32768, 512), (131072, 0), (131072, 512)):
        add(f"match {length // 1024}k, {nodes[node]}", "match", turns, length=length, node=node)
    for node in nodes:
        title = f"match + lock + pages + unlock 128k, {nodes[node]}"
        add(title, "match", turns, length=131072, node=node, borrow=True)
    add("insert 8k below 8k", "insert", turns * 3, cached=8192, new=8192, rounds=turns * 3)
    most = 10_000 if args.quick else 100_000
    for leaves in (1000, 10_000, 100_000):
        if leaves <= most:
            title = f"evict one of {leaves:,} leaves"
            add(title, "evict", turns, leaves=leaves, at_once=1, times=5)
    title = f"evict a tenth of {most:,} leaves, per leaf"
    add(title, "evict", 5, leaves=most, at_once=most // 10, times=1)
    add("prefill 128k in 64 chunks", "chunked", 5, length=131072, chunks=64, rounds=5)
    for length in (8192, 131072):
        add(f"convert a list of {length} tokens", "convert", turns, pages=(1,), length=length)
    for leaves, length in ((20_000, 32), (2000, 2048)):
        title = f"host bytes per token, {length}-token leaves"
        add(title, "memory", 1, leaves=leaves, length=length)
    size = 100 if args.quick else 500
    title = "trace T, per request"
    add(title, "trace_t", 10**9, TRACE, conversations=size, segment=size // 2)
    return found


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
        module = "bench.peers.index.worker"
        worker = Worker(LIBRARIES[library], "bench-index", module, contender, GOMP_SPINCOUNT="1000")
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


def print_row(row: Row, results: list[Result]) -> None:
    """A line for each contender: its value, and ours over it."""
    ours = next((result.value for result in results if result.contender == "ours"), None)
    lines = []
    for result in results:
        value = result.value
        if value is None:
            lines.append([result.contender, "failed", "", result.error])
        else:
            ratio = f"{ours / value:.3f} x" if ours and result.contender != "ours" else ""
            lines.append([result.contender, f"{value:,.1f}", ratio, result.details])
    unit = "B" if row.case == "memory" else "µs"
    console(200).print(f"\n{row.title}", table(["", unit, "ours is", ""], lines), sep="\n")
    found = [result.found for result in results if result.found is not None]
    if found and max(found) - min(found) >= BLOCK:
        print(f"  NOT COMPARABLE: they found {found} tokens")


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
    workers.close()
    libraries = ", ".join(f"{name} {version}" for name, version in workers.versions.items())
    print(f"\n{libraries}; {conditions()}")
    if args.json:
        found_rounds = [
            {"row": r.row.title, "contender": r.contender, "rounds": r.rounds} for r in results
        ]
        args.json.write_text(json.dumps(found_rounds))


if __name__ == "__main__":
    main()
