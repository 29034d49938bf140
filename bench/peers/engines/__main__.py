"""Whole engines against ours on the CPU: the same model, the same requests.

    make bench-peers
    make bench-peers ARGS="--quick"
    make bench-peers ARGS="--only W1 W3 --without vllm --json /tmp/engines.json"
    make bench-peers ARGS="--model smollm2"     # SmolLM2-135M in 4 bits, ours against llama.cpp

In every round each engine in turn is started in a process of its own, in its own environment,
warmed up, sent all workloads, and ended, so no engine ever works while another one is there. A
round that does not count comes first. An engine that cannot be started, or fails, is named and left
out. `docs/benchmarks.md` says what each engine is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.engines import smollm2
from bench.peers.engines.cases import SIZES, THREADS, WORKLOADS
from bench.peers.engines.contenders import BOTH, ENGINES
from bench.peers.engines.report import Results, Turn, agreements, tables
from bench.peers.process import Worker, python_of
from radixcache.bench.machine import conditions, held_bytes
from radixcache.bench.tables import console

OFF = ("W4",)
"""What engines are asked with caching off."""


class Failed(Exception):
    """An engine cannot go on; says why."""


def take_turn(engine: str, path: Path, workloads: list[str], sizes: str, seed: int) -> Turn:
    """Start an engine, warm it up, run workloads, measure its memory, end it.

    Raises:
        Failed: it could not be started, or a workload failed.
    """
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
        if worker.error or worker.process is None:
            raise Failed(worker.error)
        figures = {"start": time.perf_counter() - start}
        turn = Turn(engine, {"process": {"figures": figures, "version": worker.version}})
        wanted = [name for name in workloads if name in OFF or not engine.endswith("-off")]
        for name in wanted:
            if sizes == "full":
                ask(worker, name, "warm-up", seed + 1)
        for name in wanted:
            turn.outcomes[name] = ask(worker, name, sizes, seed)
        figures["memory"] = float(held_bytes(worker.process.pid))
    finally:
        worker.close()
    return turn


def ask(worker: Worker, workload: str, sizes: str, seed: int) -> dict[str, Any]:
    """What a workload came to; `Failed` if it did not."""
    outcome = worker.ask({"workload": workload, "sizes": sizes, "seed": seed})
    if "error" in outcome:
        raise Failed(f"{workload}: {outcome['error']}")
    return outcome


def take_turns(args: argparse.Namespace, files: dict[str, Path]) -> list[Turn]:
    """All rounds but the first, which does not count; engines that fail are named once.

    Args:
        files: the model, by `Contender.file`.
    """
    wanted = [name for name in ENGINES if name.removesuffix("-off") not in args.without]
    engines = [name for name in wanted if args.model in ENGINES[name].models]
    others = [name for name in wanted if "llama" in ENGINES[name].models and name not in engines]
    if others:
        print(f"Not compared on {args.model}: {', '.join(others)}.", flush=True)
    for name in list(engines):
        if ENGINES[name].file not in files:
            engines.remove(name)
            print(f"{name} is left out: there is no {ENGINES[name].file} file.", flush=True)
    sizes = "quick" if args.quick else "full"
    turns = []
    for number in range(args.rounds + 1):
        for engine in list(engines):
            if engine.endswith("-off") and not set(OFF) & set(args.only):
                continue
            began = time.perf_counter()
            try:
                # The first start reads from disk and compiles: it is not measured.
                size, file = sizes if number else "quick", files[ENGINES[engine].file]
                turn = take_turn(engine, file, args.only, size, args.seed)
            except Failed as failed:
                engines.remove(engine)
                print(f"{engine} is left out: {failed}.", flush=True)
                continue
            seconds = time.perf_counter() - began
            kind = f"round {number} of {args.rounds}" if number else "a round that does not count"
            print(f"{kind}: {engine} took {seconds:.0f} s", file=sys.stderr, flush=True)
            if number:
                turns.append(turn)
    left = {turn.engine for turn in turns} & set(engines)
    return [turn for turn in turns if turn.engine in left]


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


def smollm2_files(folder: Path, without: list[str]) -> dict[str, Path]:
    """SmolLM2 as it was installed, and in 8 bits if llama.cpp is there to write that."""
    files, python = {"": smollm2.find()}, python_of(ENGINES["llama.cpp"].venv)
    if python.exists() and "llama.cpp" not in without:
        command = [str(python), "-m", "bench.peers.engines.smollm2"]
        command += [str(files[""]), str(folder / "Q8_0.gguf")]
        if not subprocess.run(command, check=False, capture_output=True).returncode:
            files["Q8_0"] = folder / "Q8_0.gguf"
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", choices=BOTH, default="llama", help="random weights, 33 M (llama)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured ones (3)")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    peers = [name for name in ENGINES if name != "ours" and not name.endswith("-off")]
    parser.add_argument("--without", nargs="+", default=[], choices=peers)
    parser.add_argument("--quick", action="store_true", help="short prompts, few requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn there, too")
    args = parser.parse_args()

    sizes = SIZES["quick" if args.quick else "full"]
    print(f"seed {args.seed}; {THREADS} threads; {conditions()}")
    print("tokens and counts: " + ", ".join(f"{name} {n}" for name, n in asdict(sizes).items()))
    with tempfile.TemporaryDirectory() as folder:
        files = {"": Path(folder)}
        if args.model == "llama":
            make_model(Path(folder), args.seed, args.without)
        else:
            try:
                files = smollm2_files(Path(folder), args.without)
            except FileNotFoundError as error:
                parser.exit(1, f"{error}\n")
        turns = take_turns(args, files)
    results = Results(turns)
    titles = {name: str(work.__doc__).partition(": ")[2] for name, work in WORKLOADS.items()}
    titles["process"] = "from start to ready, and memory after the workloads."
    for title, shown in tables(results, titles):
        console(140).print(f"\n{title}", shown, sep="\n")
    print("\nanswers", *agreements(results), sep="\n")
    versions = {turn.engine: turn.outcomes["process"]["version"] for turn in turns}
    print(f"\n{', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(conditions())
    if args.json:
        found = [{"engine": turn.engine, "outcomes": turn.outcomes} for turn in turns]
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
