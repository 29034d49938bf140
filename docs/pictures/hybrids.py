"""docs/benchmarks.md: what a hybrid model prefills turn by turn, by where its states are kept."""

from __future__ import annotations

from pathlib import Path

from docs.pictures.gallery import measure
from radixcache.bench.report.plots import plots, still

COMMAND = "radixcache bench chat --states 64 --memory 110% --concurrency 1"


def take(folder: Path) -> None:
    """Replay and draw it."""
    workload = measure(COMMAND)
    by_turn = next(plot for plot in plots(workload) if plot.title == "Prefilled tokens by turn")
    (folder / "hybrids.svg").write_text(still(by_turn))
