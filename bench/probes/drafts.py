"""Measures what drafts gain: the same requests with them and without, in turns in one process.

    python -m radixcache.bench.probes.drafts     # --messages FILE: chats of agents, one a line

Live rows are questions about tables, to tabletalk, which is in the package, or another model: how
many times faster the answers come. Recorded rows are texts that were written before; a Llama of
33 M parameters with random weights computes every token, and its choice is overruled, so that only
the time is its own. Recorded are the changes of this repository's files (before a commit the file
is given, and what it was after it is said), the answers of GSM8K if its file is at hand (as
`radixcache bench` finds it), and the calls of tools in `--messages`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixcache import LLM, SamplingParams
from radixcache.bench.probes.people import ask_about, make_table
from radixcache.bench.probes.random_llama import save_random_llama
from radixcache.bench.replay.engine_level import ScriptedEngine
from radixcache.bench.replay.index_level import Serving
from radixcache.bench.replay.play import Arrivals
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.tables import console, table
from radixcache.bench.workloads.byte_level_bpe import train_encoder
from radixcache.bench.workloads.public_data import data_folder, gsm8k_answers
from radixcache.bench.workloads.records import read_records
from radixcache.bench.workloads.workload import Tokens
from radixcache.runtime.model.load import load_model

PARAMS = SamplingParams(temperature=0, max_tokens=120)
VOCABULARY = 16_384
CONTEXT = 8_000
Chat = list[dict[str, Any]]


class Run(NamedTuple):
    seconds: float
    tokens: int
    drafted: int
    accepted: int


class Row:
    """Pairs of runs, without drafts and with them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pairs: list[tuple[Run, Run]] = []

    def cells(self) -> list[str]:
        ons = [on for _, on in self.pairs]
        tokens, accepted = sum(on.tokens for on in ons), sum(on.accepted for on in ons)
        off, on = (sum(run.seconds for run in runs) for runs in zip(*self.pairs, strict=True))
        middle = statistics.median(off.seconds / on.seconds for off, on in self.pairs)
        return [
            self.name,
            f"{len(self.pairs)}",
            f"{tokens / (tokens - accepted):.2f}",
            f"{accepted / max(1, sum(on.drafted for on in ons)):.0%}",
            f"{off / on:.2f}x",
            f"{middle:.2f}x",
        ]

    def in_turns(self, *runs: Callable[[], Run], counts: bool = True) -> None:
        """`runs` are without drafts and with them; every other pair begins with the latter."""
        found = {at: runs[at]() for at in ((0, 1) if len(self.pairs) % 2 else (1, 0))}
        if counts:
            self.pairs.append((found[0], found[1]))


def ask(llm: LLM, chats: list[Chat]) -> Run:
    start = time.perf_counter()
    outputs = llm.chat(chats, PARAMS, use_tqdm=False)
    seconds = time.perf_counter() - start
    all_metrics = [output.metrics for output in outputs]
    return Run(
        seconds,
        sum(len(output.outputs[0].token_ids) for output in outputs),
        sum(sum(metrics.drafted_tokens.values()) for metrics in all_metrics),
        sum(sum(metrics.accepted_tokens.values()) for metrics in all_metrics),
    )


def live(model: str | None, pairs: int, seed: int) -> Iterator[Row]:
    llms = [LLM(model, speculate=s, kv_cache_memory_bytes="512MiB") for s in ("off", "auto")]
    rng = random.Random(seed)
    rows = [Row(name) for name in (
        "a fresh question on a known table", "regenerate", "the same question, another user",
    )]  # fmt: skip
    for pair in range(-2, pairs):
        table, people = make_table(rng)
        for llm in llms:
            ask(llm, [ask_about(rng, table, people)])
        first, other = ask_about(rng, table, people), ask_about(rng, table, people)
        answer = {"role": "assistant", "content": "I do not know."}
        for row, chat in zip(rows, (first, first, [*other, answer, first[1]]), strict=True):
            row.in_turns(*(partial(ask, llm, [chat]) for llm in llms), counts=pair >= 0)
    yield from rows
    for count in (1, 16, 64):
        row = Row(f"{count} at once, a fresh table each")
        for pair in range(-1, max(2, pairs // 4)):
            chats = [ask_about(rng, *make_table(rng)) for _ in range(count)]
            row.in_turns(*(partial(ask, llm, chats) for llm in llms), counts=pair >= 0)
        yield row
    for llm in llms:
        llm.close()


def recorded(rows: dict[str, list[list[Tokens]]], seed: int) -> Iterator[Row]:
    """Replay the recorded prompts and answers of each kind."""
    with tempfile.TemporaryDirectory() as place:
        save_random_llama(Path(place), seed)
        model = load_model(place)
    pools = [model.allocate(40_000 // 16, 16) for _ in "01"]
    servings = [Serving(Arrivals(), speculate=on) for on in (False, True)]
    for name, records in rows.items():
        kinds = Row(name), Row(f"{name}, again")
        engines = [
            ScriptedEngine(model, pool, parse_scheme("radix-16"), serving)
            for pool, serving in zip(pools, servings, strict=True)
        ]
        for record in records:
            for row in kinds:
                row.in_turns(*(partial(replay, engine, *record) for engine in engines))
        yield from kinds


def replay(engine: ScriptedEngine, prompt: Tokens, answer: Tokens) -> Run:
    start = time.perf_counter()
    request = engine.add(prompt, answer)
    while engine.has_work:
        engine.step()
    metrics = request.output().metrics
    counts = [sum(d.values()) for d in (metrics.drafted_tokens, metrics.accepted_tokens)]
    return Run(time.perf_counter() - start, len(answer), *counts)


def file_changes(limit: int) -> list[tuple[str, str]]:
    """Files of this repository before their last commits and after them; none without git."""
    root = Path(__file__).resolve().parents[2]

    def git(*command: str) -> str:
        result = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        return result.stdout if not result.returncode else ""

    found: list[tuple[str, str]] = []
    for line in git("log", "--format=%H", "-n", "400", "--diff-filter=M", "--", "*.py").split():
        for name in git("diff", "--name-only", "--diff-filter=M", f"{line}~", line).split():
            before, after = (git("show", f"{at}:{name}") for at in (f"{line}~", line))
            if name.endswith(".py") and 1000 < len(before) < 8000 and len(after) < 8000:
                found.append((before, after))
                break
        if len(found) == limit:
            break
    return found


def calls_of_tools(path: Path) -> Iterator[tuple[str, str]]:
    """Each call of a tool as JSON, and all that came before it in its chat."""
    for _, record in read_records(path):
        before = ""
        for message in record["messages"]:
            calls = "".join(f"{call['function']}" for call in message.get("tool_calls") or [])
            if calls:
                yield before, calls
            before += f"\n{message['role']}: {message.get('content') or ''}{calls}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="that is asked about tables (tabletalk)")
    parser.add_argument("--pairs", type=int, default=24, help="of live runs (24)")
    parser.add_argument("--records", type=int, default=24, help="of each recorded kind (24)")
    parser.add_argument("--messages", type=Path, help="chats with calls of tools, JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts: dict[str, list[tuple[str, str]]] = {
        "a file, and after it its next version": file_changes(args.records)
    }
    if (folder := data_folder()) is not None:
        texts["GSM8K, people's answers"] = gsm8k_answers(folder)[: args.records]
    if args.messages is not None:
        texts["calls of tools by an agent"] = [*calls_of_tools(args.messages)][: args.records]
    shown = console(100)
    rows = [*live(args.model, args.pairs, args.seed)]
    encode = train_encoder(
        (t for pairs in texts.values() for pair in pairs for t in pair), VOCABULARY
    )
    scripts: dict[str, list[list[Tokens]]] = {}
    for name, pairs in texts.items():
        tokens = [[np.array(encode(text), np.int32) for text in pair] for pair in pairs]
        scripts[name] = [pair for pair in tokens if sum(map(len, pair)) < CONTEXT]
    rows += recorded(scripts, args.seed)
    header = ["requests", "runs", "tok/step", "accepted", "time", "median"]
    shown.print(table(header, [row.cells() for row in rows]))


if __name__ == "__main__":
    main()
