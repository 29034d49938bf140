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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.process import Failed, Worker
from bench.peers.report import comparison
from radixcache.bench.machine import conditions
from radixcache.bench.tables import console

LIBRARIES = {"ours": ".venv", "sglang": ".venv-sglang", "vllm": ".venv-vllm"}

BLOCK = 16
"""vLLM's page size in every row: it appears once, in the rows of page 16 if there are any."""

CONTENDERS = ("ours", "ours-token", "sglang-rust", "sglang-python", "vllm")


@dataclass
class Row:
    title: str
    case: str
    rounds: int
    params: dict[str, Any]
    page_size: int = 1


@dataclass
class Result:
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    found: int | None = None
    """Tokens found, where the row looks something up."""

    def values(self, case: str) -> list[float]:
        """Microseconds, or bytes per token, of each round."""
        if case == "memory":
            return [r["bytes"] / r["tokens"] for r in self.rounds]
        if case == "trace_t":
            return [sum(r["phases"].values()) / 1000 / r["segment"] for r in self.rounds]
        return [median(r["ns"]) / 1000 for r in self.rounds]

    @property
    def note(self) -> str:
        """Why it failed; or what a trace's cost consists of, and its hits."""
        if self.error or not self.rounds or "phases" not in self.rounds[-1]:
            return self.error
        last = self.rounds[-1]
        parts = {
            phase: sum(r["phases"].get(phase, 0) for r in self.rounds) / 1000 / last["requests"]
            for phase in dict.fromkeys(phase for r in self.rounds for phase in r["phases"])
        }
        hits, prompts = last["hit_tokens"], last["prompt_tokens"]
        phases = ", ".join(f"{phase} {us:.0f}" for phase, us in parts.items())
        return (
            f"mean {sum(parts.values()):.0f} ({phases}); "
            f"hits {hits:,} of {prompts:,}, {hits / prompts:.4f}"
        )


def rows(pages: list[int], only: list[str] | None, quick: bool) -> Iterator[Row]:
    turns = 5 if quick else 15
    most = 10_000 if quick else 100_000
    size = 100 if quick else 500
    found: list[tuple[str, str, int, dict[str, Any]]] = []
    nodes = {0: "one node", 512: "512-token nodes"}
    for length, node in ((1024, 0), (8192, 512), (32768, 512), (131072, 0), (131072, 512)):
        title = f"match {length // 1024}k, {nodes[node]}"
        found.append((title, "match", turns, {"length": length, "node": node}))
    for node in nodes:
        title = f"match + lock + pages + unlock 128k, {nodes[node]}"
        found.append((title, "match", turns, {"length": 131072, "node": node, "borrow": True}))
    many = turns * 3
    params = {"cached": 8192, "new": 8192, "rounds": many}
    found.append(("insert 8k below 8k", "insert", many, params))
    for leaves in (leaves for leaves in (1000, 10_000, 100_000) if leaves <= most):
        params = {"leaves": leaves, "at_once": 1, "times": 5}
        found.append((f"evict one of {leaves:,} leaves", "evict", turns, params))
    params = {"leaves": most, "at_once": most // 10, "times": 1}
    found.append((f"evict a tenth of {most:,} leaves, per leaf", "evict", 5, params))
    params = {"length": 131072, "chunks": 64, "rounds": 5}
    found.append(("prefill 128k in 64 chunks", "chunked", 5, params))
    for length in (8192, 131072):
        title = f"convert a list of {length} tokens"
        found.append((title, "convert", turns, {"length": length}))
    for leaves, length in ((20_000, 32), (2000, 2048)):
        title = f"host bytes per token, {length}-token leaves"
        found.append((title, "memory", 1, {"leaves": leaves, "length": length}))
    params = {"conversations": size, "segment": size // 2}
    found.append(("trace T, per request", "trace_t", 10**9, params))
    for title, case, rounds, params in found:
        for page in pages if case != "convert" else [1]:
            if not only or case in only:
                yield Row(f"{title}, page {page}", case, rounds, params, page)


class Workers:
    """One process per contender, kept from row to row; a library that fails is named once."""

    def __init__(self, left_out: list[str]) -> None:
        self.left_out = set(left_out)
        self.versions: dict[str, str] = {}
        self.kept: dict[str, Worker] = {}

    def of(self, contender: str, fresh: bool = False) -> Worker | None:
        """The contender's process, with `fresh` a new one; None if its library is left out."""
        library = contender.partition("-")[0]
        if library in self.left_out:
            return None
        if fresh and contender in self.kept:
            self.kept.pop(contender).close()
        if contender not in self.kept:
            command = "bench.peers.index.worker", contender
            try:
                worker = Worker(LIBRARIES[library], "bench-index", *command, GOMP_SPINCOUNT="1000")
            except Failed as failed:
                self.left_out.add(library)
                print(f"{library} is left out: {failed}.", flush=True)
                return None
            self.versions[library] = worker.version
            self.kept[contender] = worker
        return self.kept[contender]


def run(row: Row, pages: list[int], seed: int, workers: Workers) -> dict[str, Result]:
    """One row: every contender set up, then round by round in turn."""
    results: dict[str, Result] = {}
    active: dict[str, Worker] = {}
    for contender in CONTENDERS:
        if contender == "vllm" and row.page_size != BLOCK and BLOCK in pages:
            continue
        if contender == "ours-token" and row.case != "trace_t":  # who differs in decoding alone
            continue
        worker = workers.of(contender, fresh=row.case == "memory")
        if worker is None:
            continue
        result = results[contender] = Result()
        page_size = BLOCK if contender == "vllm" else row.page_size
        request = {"case": row.case, "seed": seed, "page_size": page_size, **row.params}
        try:
            result.found = worker.ask(request).get("found")
            active[contender] = worker
        except Failed as failed:
            result.error = str(failed)
    for _ in range(row.rounds):
        for contender, worker in list(active.items()):
            try:
                answer = worker.ask({})
            except Failed as failed:
                results[contender].error, answer = str(failed), {"end": True}
            if "end" in answer:
                del active[contender]
            else:
                results[contender].rounds.append(answer)
        if not active:
            break
    for worker in active.values():
        worker.ask({"case": "nothing"})  # what the last case held is gone before the next
    return results


def print_row(row: Row, results: dict[str, Result]) -> None:
    """A line for each contender: its value, and ours over it."""
    unit = "B" if row.case == "memory" else "µs"
    found = {name: {unit: result.values(row.case)} for name, result in results.items()}
    shown = comparison(found, notes={name: result.note for name, result in results.items()})
    console(200).print(f"\n{row.title}", shown, sep="\n")
    lengths = [result.found for result in results.values() if result.found is not None]
    if lengths and max(lengths) - min(lengths) >= BLOCK and not row.params.get("borrow"):
        print(f"  NOT COMPARABLE: they found {lengths} tokens")


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
    found = []
    for row in rows(args.pages, args.only, args.quick):
        results = run(row, args.pages, args.seed, workers)
        print_row(row, results)
        for name, result in results.items():
            found.append({"row": row.title, "contender": name, "rounds": result.rounds})
    for worker in workers.kept.values():
        worker.close()
    libraries = ", ".join(f"{name} {version}" for name, version in workers.versions.items())
    print(f"\n{libraries}; {conditions()}")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
