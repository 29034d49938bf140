"""One library's side of `bench.peers.index`: reads a request per line, answers with a line of JSON.

    python -m bench.peers.index.worker sglang-rust

`{"case": "match", ...}` sets a case up, `{}` asks for its next round. It runs in the library's own
environment, in which neither torch nor our dependencies need to be those of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from bench.peers.index.cases import CASES, Make, Round
from bench.peers.process import serve

CLASSES = {
    "ours": ("radixcache", "Ours", {}),
    "ours-token": ("radixcache", "Ours", {"decoding": "token"}),
    "sglang-rust": ("sglang", "SGLang", {"core": "rust"}),
    "sglang-python": ("sglang", "SGLang", {"core": "python"}),
    "vllm": ("vllm", "VLLM", {}),
}
"""Of each contender the package, the class in the module of its library here, and its options."""

rounds: Iterator[Round] = iter(())


def load() -> tuple[Make, str]:
    """How to make the index that was asked for, and its library's version."""
    package, name, options = CLASSES[sys.argv[1]]
    module = import_module(f"bench.peers.index.{sys.argv[1].partition('-')[0]}")
    return partial(getattr(module, name), **options), import_module(package).__version__


def answer(make: Make, request: dict[str, Any]) -> Round:
    global rounds
    if request:
        rounds = iter(())  # what the last case held is gone before the next
        rounds = CASES[request.pop("case")](make, **request)
    return next(rounds, {"end": True})


if __name__ == "__main__":
    serve(load, answer)
