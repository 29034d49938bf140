"""One library's side of `bench.peers.index`: reads a request per line, answers with a line of JSON.

    python -m bench.peers.index.worker sglang-rust

`{"case": "match", ...}` sets a case up, `{}` asks for its next round. It runs in the library's own
environment, in which neither torch nor our dependencies need to be those of the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import cast

from bench.peers.index.cases import CASES, Make, Round
from bench.peers.process import one_line, say

PACKAGES = {"ours": "radixcache", "sglang": "sglang", "vllm": "vllm"}


def make_of(name: str) -> Make:
    """How to make the index called `name`; imports the library that has it."""
    library, _, variant = name.partition("-")
    if library == "ours":
        from bench.peers.index.ours import Decoding, Ours

        return partial(Ours, decoding=cast(Decoding, variant or "ahead"))
    if library == "sglang":
        from bench.peers.index.sglang import SGLang

        core, _, decoding = variant.partition("-")
        return partial(SGLang, core=core, decoding=decoding or "step")
    from bench.peers.index.vllm import VLLM

    return VLLM


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is not an answer
    rounds: Iterator[Round] = iter(())
    try:
        make = make_of(sys.argv[1])
    except Exception as error:
        say(answers, {"error": one_line(error)})
        return
    package = import_module(PACKAGES[sys.argv[1].partition("-")[0]])
    say(answers, {"version": package.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request:
                rounds = iter(())
                rounds = CASES[request.pop("case")](make, **request)
            say(answers, next(rounds, {"end": True}))
        except Exception as error:
            say(answers, {"error": one_line(error)})


if __name__ == "__main__":
    main()
