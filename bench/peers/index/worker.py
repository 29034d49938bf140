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
from typing import Any, cast

from bench.peers.index.cases import CASES, Make, Round
from bench.peers.process import serve

rounds: Iterator[Round] = iter(())


def load() -> tuple[Make, str]:
    """How to make the index that was asked for, and its library's version."""
    library, _, variant = sys.argv[1].partition("-")
    make: Make
    if library == "ours":
        from bench.peers.index.ours import Decoding, Ours

        make = partial(Ours, decoding=cast(Decoding, variant or "ahead"))
    elif library == "sglang":
        from bench.peers.index.sglang import SGLang

        core, _, decoding = variant.partition("-")
        make = partial(SGLang, core=core, decoding=decoding or "step")
    else:
        from bench.peers.index.vllm import VLLM

        make = VLLM
    package = import_module({"ours": "radixcache"}.get(library, library))
    return make, package.__version__


def answer(make: Make, request: dict[str, Any]) -> Round:
    """Set a case up, or run its next round."""
    global rounds
    if request:
        rounds = iter(())  # what the last case held is gone before the next
        rounds = CASES[request.pop("case")](make, **request)
    return next(rounds, {"end": True})


if __name__ == "__main__":
    serve(load, answer)
