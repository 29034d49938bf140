"""One engine's side of `bench.peers.engines`: loads it, says so, then runs a workload a line.

python -m bench.peers.engines.worker vllm FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from bench.peers.engines.cases import SIZES, Engine, run
from bench.peers.process import one_line, say


def load(name: str, folder: Path) -> Engine:
    """The engine called `name`; imports the library that it is."""
    if name in ("ours", "ours-off"):
        from bench.peers.engines.ours import Ours

        return Ours(folder, "none" if name.endswith("off") else "radix")
    if name in ("transformers", "transformers-kept"):
        from bench.peers.engines.transformers import Transformers, TransformersKept

        return TransformersKept(folder) if name.endswith("kept") else Transformers(folder)
    if name == "transformers-batch":
        from bench.peers.engines.transformers_batch import TransformersBatch

        return TransformersBatch(folder)
    if name in ("vllm", "vllm-off"):
        from bench.peers.engines.vllm import VLLM

        return VLLM(folder, caching=name == "vllm")
    if name == "llama.cpp":
        from bench.peers.engines.llama_cpp import LlamaCpp

        return LlamaCpp(folder)
    raise ValueError(f"no engine is called {name}")


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is not an answer
    try:
        engine = load(sys.argv[1], Path(sys.argv[2]))
    except Exception as error:
        say(answers, {"error": one_line(error)})
        os._exit(1)
    say(answers, {"version": engine.version})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            sizes = SIZES[request["sizes"]]
            outcome = run(request["workload"], engine, sizes, request["seed"])
            say(answers, asdict(outcome))
        except Exception as error:
            say(answers, {"error": one_line(error)})
    os._exit(0)  # whatever threads an engine has


if __name__ == "__main__":
    main()
