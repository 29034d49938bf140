"""Whole engines against ours on the CPU: the same model, the same requests.

    make bench-peers
    make bench-peers ARGS="--quick"
    make bench-peers ARGS="--only W1 W3 --without vllm"
    make bench-peers ARGS="--model FILE.gguf"     # ours against llama.cpp, on a file of yours
    make bench-peers ARGS="--model FILE.gguf --formats Q4_K_M Q4_0 Q8_0"    # and written so, each

In every round each engine in turn is started in a process of its own, in its own environment,
warmed up, sent all workloads, and ended, so no engine ever works while another one is there. A
round that does not count comes first. An engine that cannot be started, or fails, is named and left
out. `docs/benchmarks.md` says what each engine is given.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import SIZES, THREADS, WORKLOADS
from bench.peers.engines.worker import ENGINES
from bench.peers.process import Failed, Worker, python_of
from bench.peers.report import comparison
from radixcache.bench.machine import conditions, held_bytes
from radixcache.bench.tables import console


@dataclass
class Turn:
    """The turn of one engine in one round: outcomes by workload, as the worker sent them."""

    engine: str
    version: str = ""
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)


def take_turn(engine: str, path: Path, workloads: list[str], sizes: str, seed: int) -> Turn:
    """Start an engine, warm it up, run workloads, measure its memory, end it. Raises `Failed`."""
    start = time.perf_counter()
    worker = Worker(
        ENGINES[engine].venv,
        "bench-peers",
        "bench.peers.engines.worker",
        engine,
        str(path),
        OMP_NUM_THREADS=str(THREADS),
        HF_HUB_OFFLINE="1",
    )
    try:
        process = {"start, s": time.perf_counter() - start}
        turn = Turn(engine, worker.version)
        for kind, number in (("warm-up", seed + 1), (sizes, seed)):
            for name in workloads if kind != "warm-up" or sizes == "full" else ():
                turn.outcomes[name] = worker.ask({"workload": name, "sizes": kind, "seed": number})
        process["memory, MB"] = held_bytes(worker.process.pid) / 1e6
        turn.outcomes["process"] = {"figures": process}
    finally:
        worker.close()
    return turn


def take_turns(args: argparse.Namespace, model: Path) -> list[Turn]:
    """All rounds but the first, which does not count; engines that fail are named once."""
    model_kind = "gguf" if args.model else "llama"
    left = [n for n, one in ENGINES.items() if model_kind in one.on and n not in args.without]
    sizes = "quick" if args.quick else "full"
    turns = []
    for number in range(args.rounds + 1):
        for name in list(left):
            began = time.perf_counter()
            try:
                # The first start reads from disk and compiles: it is not measured.
                turn = take_turn(name, model, args.only, sizes if number else "quick", args.seed)
            except Failed as failed:
                left.remove(name)
                print(f"{name} is left out: {failed}.", flush=True)
                continue
            seconds = time.perf_counter() - began
            kind = f"round {number} of {args.rounds}" if number else "a round that does not count"
            print(f"{kind}: {name} took {seconds:.0f} s", file=sys.stderr, flush=True)
            if number:
                turns.append(turn)
    return [turn for turn in turns if turn.engine in left]


def figures(turns: list[Turn], workload: str) -> dict[str, dict[str, list[float]]]:
    """The figures of a workload, one value a round, by engine and name."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in turns:
        for name, value in turn.outcomes.get(workload, {}).get("figures", {}).items():
            found.setdefault(turn.engine, {}).setdefault(name, []).append(value)
    return found


def agreements(turns: list[Turn]) -> Iterator[str]:
    """Say how many of each engine's answers are the reference's in every round."""
    engines = list(dict.fromkeys(turn.engine for turn in turns))
    reference = "transformers" if "transformers" in engines else "ours"
    right = next((turn.outcomes for turn in turns if turn.engine == reference), {})
    for engine in engines:
        mine = [turn.outcomes for turn in turns if turn.engine == engine]
        same = [
            all(answer == other for other in others)
            for workload in right.keys() & mine[0].keys() - {"process"}
            for answer, *others in zip(
                right[workload]["answers"], *(found[workload]["answers"] for found in mine),
                strict=True,
            )
        ]  # fmt: skip
        if engine != reference and same:
            yield f"  {engine:18}{sum(same):4} of {len(same)} answers are those of {reference}"


def make_model(folder: Path, seed: int, without: list[str]) -> None:
    """A Llama with random weights, and the same as a GGUF file if llama.cpp is there.

    In processes of their own: pages of a library that this one maps, too, would count half.
    """
    random_llama = "radixcache.bench.probes.random_llama"
    command = [sys.executable, "-m", random_llama, str(folder), str(seed)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    python = python_of(ENGINES["llama.cpp"].venv)
    if python.exists() and "llama.cpp" not in without:
        # If it fails, there is no file, and llama.cpp says so itself.
        command = [str(python), "-m", "bench.peers.engines.gguf_model", str(folder)]
        subprocess.run(command, check=False)


def write_as(folder: Path, file: Path, kind: str) -> Path:
    """A GGUF file in another of llama.cpp's formats."""
    python = python_of(ENGINES["llama.cpp"].venv)
    if not python.exists():
        sys.exit("llama.cpp, which writes the formats, is not installed")
    command = [str(python), "-m", "bench.peers.engines.gguf_model", str(folder), str(file), kind]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"llama.cpp could not write {kind}: {done.stderr.strip().splitlines()[-1]}")
    return folder / "model.gguf"


def compare(args: argparse.Namespace, model: Path) -> None:
    """Take the turns, and print the tables."""
    turns = take_turns(args, model)
    titles = {name: str(work.__doc__).partition(": ")[2] for name, work in WORKLOADS.items()}
    titles["process"] = "from start to ready, and memory after the workloads."
    for workload, title in titles.items():
        if found := figures(turns, workload):
            console(140).print(f"\n{workload}: {title}", comparison(found), sep="\n")
    print("\nanswers", *agreements(turns), sep="\n")
    versions = {turn.engine: turn.version for turn in turns}
    print(f"\n{', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(conditions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file (a Llama of 33 M, random weights)"
    )
    parser.add_argument(
        "--formats", nargs="+", metavar="F", help="llama.cpp's, to write the file in (as it is)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured ones (3)")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    peers = [name for name in ENGINES if name != "ours"]
    parser.add_argument("--without", nargs="+", default=[], choices=peers)
    parser.add_argument("--quick", action="store_true", help="short prompts, few requests")
    args = parser.parse_args()
    if args.formats and args.model is None:
        parser.error("--formats is for a file: say --model FILE.gguf")

    sizes = SIZES["quick" if args.quick else "full"]
    print(f"seed {args.seed}; {THREADS} threads; {conditions()}")
    print("tokens and counts: " + ", ".join(f"{name} {n}" for name, n in asdict(sizes).items()))
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(Path(folder), args.seed, args.without)
        for kind in args.formats or [None]:
            model = args.model or Path(folder)
            if kind is not None:
                model = write_as(Path(folder), args.model, kind)
                print(f"\n{args.model.name} as {kind}, {model.stat().st_size / 1e6:.0f} MB")
            compare(args, model)


if __name__ == "__main__":
    main()
