"""The demo of a warm restart: a conversation about a document goes on in another process.

    python -m radixcache.runtime.demo.restart < job.json

is one of the processes: it answers a conversation, and prints the costs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

from radixcache.errors import RadixCacheError
from radixcache.runtime.demo.script import SCRIPT, TABLE, Question

_FIRST, _SECOND = (question for question in SCRIPT if question.user == "Ana" and not question.edits
                   and question.text.startswith("What is the"))  # fmt: skip
_ROWS = ("in the first process", "after a restart", "the same, without kv_dir")


@dataclass(frozen=True)
class Turn:
    """A process's answer.

    Attributes:
        tokens: ids of the prompt and the answer.
        computed: prompt tokens that were prefilled.
    """

    answer: str
    tokens: list[int]
    computed: int
    loaded: int
    ttft_ms: float


def run(engine: Mapping[str, Any], as_json: bool = False) -> int:
    """Play and show the demo; returns the exit code, 0 if all was right."""
    messages = [{"role": "system", "content": TABLE.read_text()}, _ask(_FIRST)]
    with TemporaryDirectory(prefix="radixcache-") as folder:
        kept = {**engine, "kv_dir": folder, "kv_dir_size": "500MB"}
        first = _in_a_process(kept, messages)
        messages += [{"role": "assistant", "content": first.answer}, _ask(_SECOND)]
        warm = _in_a_process(kept, messages)
    cold = _in_a_process(engine, messages)
    new = len(warm.tokens) - len(first.tokens)
    right = all(
        turn.answer.endswith(f" is {question.expected}.")
        for turn, question in ((first, _FIRST), (warm, _SECOND))
    )
    ok = right and warm.tokens == cold.tokens and warm.computed <= new
    turns = (first, warm, cold)
    if as_json:
        print(json.dumps({"turns": [asdict(turn) for turn in turns], "ok": ok}, indent=2))
    else:
        print("\n".join(_table(turns, ok)))
    return 0 if ok else 1


def _table(turns: Iterable[Turn], ok: bool) -> list[str]:
    first, warm, cold = turns
    return [
        "A conversation about a document goes on after the process has ended.",
        "",
        f"{'':26}{'prompt':>8}{'loaded':>8}{'computed':>10}{'TTFT':>10}",
        *(
            f"{name:26}{turn.loaded + turn.computed:>8,}{turn.loaded:>8,}{turn.computed:>10,}"
            f"{turn.ttft_ms:>7.0f} ms"
            for name, turn in zip(_ROWS, (first, warm, cold), strict=True)
        ),
        "",
        f"{_SECOND.text} {warm.answer}",
        "The answer is the same, and only what was new was computed: "
        f"{cold.ttft_ms / warm.ttft_ms:.0f}x."
        if ok
        else "SOMETHING IS WRONG: the answers differ, or more was computed than what was new.",
    ]


def _ask(question: Question) -> dict[str, str]:
    return {"role": "user", "content": question.text}


def _in_a_process(engine: Mapping[str, Any], messages: list[dict[str, str]]) -> Turn:
    done = subprocess.run(
        [sys.executable, "-m", "radixcache.runtime.demo.restart"],
        input=json.dumps({"engine": {**engine}, "messages": messages}, default=str),
        stdout=subprocess.PIPE,
        text=True,
    )
    with suppress(ValueError, TypeError):
        return Turn(**json.loads(done.stdout))
    raise RadixCacheError("the demo's process ended without an answer")


def _answer(job: Mapping[str, Any]) -> Turn:
    from radixcache import LLM, SamplingParams

    with LLM(**job["engine"]) as llm:
        llm.generate("A warm-up.", SamplingParams(max_tokens=2), cache_salt="warm-up")
        (output,) = llm.chat(job["messages"], SamplingParams(temperature=0, max_tokens=64))
        completion, metrics = output.outputs[0], output.metrics
        return Turn(
            completion.text,
            [*output.prompt_token_ids, *completion.token_ids],
            metrics.prefilled_tokens,
            metrics.loaded_tokens,
            round(1000 * (metrics.ttft or 0), 3),
        )


if __name__ == "__main__":
    print(json.dumps(asdict(_answer(json.load(sys.stdin)))))
