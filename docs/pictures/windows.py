"""docs/benchmarks.md: hits of a model with windows over memory, by how its windows are kept."""

from __future__ import annotations

from pathlib import Path

from docs.pictures.gallery import measure
from radixcache.bench.report.plots import plots, still

COMMAND = (
    "radixcache bench chat:conversations=40,turns=12,system=1500,user=150,answer=350 "
    "--windows gemma-3-27b --memory 10% 20% 30% 50% 100% --concurrency 1"
)


def take(folder: Path) -> None:
    """Replay and draw it."""
    (folder / "windows.svg").write_text(still(next(plots(measure(COMMAND)))))
