"""The indexes that are compared, and one's side: a request a line, answered with a line of JSON.

    python -m bench.peers.index.worker sglang-rust

`{"case": "match", ...}` sets a case up, `{}` asks for its next round. It runs in the library's own
environment, in which neither torch nor our dependencies need to be those of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.peers.index.cases import CASES, Make, Round
from bench.peers.process import Contender, serve

_SGLANG = (".venv-sglang", "bench.peers.index.sglang", "SGLang")

CONTENDERS = {
    "ours": Contender(".venv", "bench.peers.index.ours", "Ours"),
    "sglang-rust": Contender(*_SGLANG, {"core": "rust"}),
    "sglang-python": Contender(*_SGLANG, {"core": "python"}),
    "vllm": Contender(".venv-vllm", "bench.peers.index.vllm", "VLLM"),
}

rounds: Iterator[Round] = iter(())


def load() -> tuple[Make, str]:
    """How to make the index that was asked for, and its library's version."""
    contender = CONTENDERS[sys.argv[1]]
    index = contender.load()
    return partial(index, **contender.options), index.version


def answer(make: Make, request: dict[str, Any]) -> Round:
    global rounds
    if request:
        rounds = iter(())  # what the last case held is gone before the next
        rounds = CASES[request.pop("case")](make, **request)
    return next(rounds, {"end": True})


if __name__ == "__main__":
    serve(load, answer)
