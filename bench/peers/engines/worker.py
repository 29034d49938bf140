"""One engine's side of `bench.peers.engines`: loads it, says so, then runs a workload a line.

python -m bench.peers.engines.worker vllm FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import SIZES, Engine, run
from bench.peers.engines.contenders import ENGINES
from bench.peers.process import serve


def load() -> tuple[Engine, str]:
    """The engine that was asked for, and its version."""
    engine = ENGINES[sys.argv[1]].load(Path(sys.argv[2]))
    return engine, engine.version


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """One workload."""
    return asdict(run(request["workload"], engine, SIZES[request["sizes"]], request["seed"]))


if __name__ == "__main__":
    serve(load, answer)
