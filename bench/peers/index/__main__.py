"""Our index against the real indexes of SGLang and vLLM, side by side.

    make bench-index
    make bench-index ARGS="--quick"
    make bench-index ARGS="--only evict"

Every library runs in processes of its own, in its own environment, and they take turns round by
round: same tokens, same pool, same operations, so that what the machine does meanwhile hits all of
them. Times are thread CPU time, medians. A library that cannot be loaded is named and left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.peers.index.worker import CONTENDERS
from bench.peers.process import Failed, Worker
from bench.peers.report import comparison
from radixcache.bench.machine import conditions
from radixcache.bench.tables import console

PAGES = (1, 16)
"""Page sizes; vLLM appears once, in the rows of the last."""


class Row(NamedTuple):
    title: str
    case: str
    rounds: int
    params: dict[str, Any]


@dataclass
class Result:
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    found: int | None = None
    """Tokens found, where the row looks something up."""


def rows(quick: bool) -> Iterator[Row]:
    turns, most = (5, 10_000) if quick else (15, 100_000)
    nodes = {0: "one node", 512: "512-token nodes"}
    for length, node in ((1024, 0), (8192, 512), (32768, 512), (131072, 0), (131072, 512)):
        title = f"match {length // 1024}k, {nodes[node]}"
        yield Row(title, "match", turns, {"length": length, "node": node})
    for node in nodes:
        title = f"match + lock + pages + unlock 128k, {nodes[node]}"
        yield Row(title, "match", turns, {"length": 131072, "node": node, "borrow": True})
    for leaves in (1000, 10_000, 100_000):
        if leaves <= most:
            params = {"leaves": leaves, "at_once": 1, "times": 5}
            yield Row(f"evict one of {leaves:,} leaves", "evict", turns, params)
    params = {"leaves": most, "at_once": most // 10, "times": 1}
    yield Row(f"evict a tenth of {most:,} leaves, per leaf", "evict", 5, params)


class Workers:
    """One process per contender, kept from row to row; a library that fails is named once."""

    def __init__(self, left_out: list[str]) -> None:
        self.left_out = set(left_out)
        self.versions: dict[str, str] = {}
        self.kept: dict[str, Worker] = {}

    def of(self, contender: str) -> Worker | None:
        """The contender's process; None if its library is left out."""
        library = contender.partition("-")[0]
        if library in self.left_out:
            return None
        if contender not in self.kept:
            command = "bench.peers.index.worker", contender
            try:
                worker = Worker(
                    CONTENDERS[contender].venv, "bench-index", *command, GOMP_SPINCOUNT="1000"
                )
            except Failed as failed:
                self.left_out.add(library)
                print(f"{library} is left out: {failed}.", flush=True)
                return None
            self.versions[library] = worker.version
            self.kept[contender] = worker
        return self.kept[contender]


def run(row: Row, page_size: int, seed: int, workers: Workers) -> dict[str, Result]:
    """One row: every contender set up, then round by round in turn."""
    results: dict[str, Result] = {}
    active: dict[str, Worker] = {}
    for contender in CONTENDERS:
        if contender == "vllm" and page_size != PAGES[-1]:
            continue
        worker = workers.of(contender)
        if worker is None:
            continue
        result = results[contender] = Result()
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


def print_row(title: str, results: dict[str, Result]) -> None:
    """A line for each contender: its value, and ours over it."""
    found = {name: {"µs": [r["value"] for r in one.rounds]} for name, one in results.items()}
    shown = comparison(found, notes={name: result.error for name, result in results.items()})
    console(200).print(f"\n{title}", shown, sep="\n")
    lengths = [result.found for result in results.values() if result.found is not None]
    if lengths and max(lengths) - min(lengths) >= PAGES[-1]:
        print(f"  NOT COMPARABLE: they found {lengths} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=["match", "evict"])
    parser.add_argument("--without", nargs="+", default=[], choices=["sglang", "vllm"])
    parser.add_argument("--quick", action="store_true", help="smaller trees")
    args = parser.parse_args()

    print(f"seed {args.seed}; {conditions()}")
    workers = Workers(args.without)
    for row in rows(args.quick):
        for page_size in PAGES:
            if not args.only or row.case in args.only:
                results = run(row, page_size, args.seed, workers)
                print_row(f"{row.title}, page {page_size}", results)
    for worker in workers.kept.values():
        worker.close()
    libraries = ", ".join(f"{name} {version}" for name, version in workers.versions.items())
    print(f"\n{libraries}; {conditions()}")


if __name__ == "__main__":
    main()
