"""Tables and agreement of `bench.peers.engines`, from what every turn measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from radixcache.bench.tables import table

OURS = "ours"
REFERENCE = "transformers"


def ours_for(engine: str) -> str:
    """Ours over the same file as that engine's."""
    return f"{OURS}-Q8_0" if engine.endswith("-Q8_0") else OURS


@dataclass(frozen=True)
class Figure:
    """A column: which figure of which workload, and its unit.

    More tokens per second are better, less of everything else.
    """

    workload: str
    name: str
    unit: str

    @property
    def title(self) -> str:
        off = ", no cache" if self.workload.endswith(" off") else ""
        return f"{self.name}{off}, {self.unit}"

    def show(self, value: float) -> str:
        """A value in seconds, bytes or tokens per second, in the unit."""
        scaled = value * {"ms": 1e3, "s": 1.0, "MB": 1e-6, "tokens/s": 1.0}[self.unit]
        return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.{1 if scaled >= 10 else 2}f}"


FIGURES = (
    Figure("W1", "first TTFT", "ms"),
    Figure("W1", "TTFT of a hit", "ms"),
    Figure("W1", "a token after", "ms"),
    Figure("W1", "all", "s"),
    Figure("W2", "TTFT from turn 2", "ms"),
    Figure("W2", "all", "s"),
    Figure("W3", "cold", "s"),
    Figure("W3", "warm", "s"),
    Figure("W4", "a request", "ms"),
    Figure("W4 off", "a request", "ms"),
    Figure("W5", "read", "tokens/s"),
    Figure("W5", "written by one", "tokens/s"),
    Figure("W5", "written by eight", "tokens/s"),
    Figure("process", "start", "s"),
    Figure("process", "memory", "MB"),
)


@dataclass
class Turn:
    """What one engine did in one round: outcomes by workload, as the worker sent them."""

    engine: str
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def value(self, figure: Figure) -> float | None:
        """A figure of this turn, in seconds, bytes or tokens per second."""
        workload = figure.workload.removesuffix(" off")
        found: float | None = self.outcomes.get(workload, {}).get("figures", {}).get(figure.name)
        return found

    @property
    def answers(self) -> dict[str, list[list[int]]]:
        """Every answer, by workload."""
        return {
            name: found["answers"] for name, found in self.outcomes.items() if "answers" in found
        }


class Results:
    """All turns that were measured."""

    def __init__(self, turns: list[Turn]) -> None:
        self.turns = turns
        self.engines = list(dict.fromkeys(t.engine for t in turns if not t.engine.endswith("-off")))
        self.reference = REFERENCE if REFERENCE in self.engines else OURS

    def values(self, engine: str, figure: Figure) -> list[float]:
        """One for each round in which the engine was measured."""
        name = f"{engine}-off" if figure.workload.endswith(" off") else engine
        found = (turn.value(figure) for turn in self.turns if turn.engine == name)
        return [value for value in found if value is not None]

    def ratio(self, engine: str, figure: Figure) -> float | None:
        """Ours over theirs, of the medians over the rounds."""
        ours, theirs = self.values(ours_for(engine), figure), self.values(engine, figure)
        return median(ours) / median(theirs) if ours and theirs else None

    def agreement(self, engine: str) -> tuple[int, int] | None:
        """In how many answers it agrees with the reference in every round, and of how many."""
        mine = [turn.answers for turn in self.turns if turn.engine == engine]
        reference = [turn.answers for turn in self.turns if turn.engine == self.reference]
        if not mine or not reference:
            return None
        same = [
            all(answer == other for other in others)
            for workload, answers in reference[0].items()
            if all(workload in turn for turn in mine)
            for answer, *others in zip(answers, *(turn[workload] for turn in mine), strict=True)
        ]
        return sum(same), len(same)


def tables(results: Results, titles: dict[str, str]) -> Iterator[tuple[str, Table]]:
    """A table for each workload: median, half the range over it, ours / theirs."""
    for workload, title in titles.items():
        columns = [
            figure
            for figure in FIGURES
            if figure.workload.removesuffix(" off") == workload
            and any(results.values(engine, figure) for engine in results.engines)
        ]
        if columns:
            header = ["", *(text for figure in columns for text in (figure.title, "ours is"))]
            rows = [
                [engine, *(text for figure in columns for text in _cells(results, engine, figure))]
                for engine in results.engines
            ]
            yield f"{workload}: {title}", table(header, rows)


def _cells(results: Results, engine: str, figure: Figure) -> tuple[str, str]:
    values = results.values(engine, figure)
    if not values:
        return "", ""
    middle = median(values)
    half = (max(values) - min(values)) / 2 / middle
    spread = f" ±{half * 100:.0f}%" if len(values) > 1 else ""
    ratio = results.ratio(engine, figure)
    compared = f"{ratio:.3f} x" if ratio and engine != ours_for(engine) else ""
    return figure.show(middle) + spread, compared


def agreements(results: Results) -> Iterator[str]:
    """One line for each engine, those without a cache too."""
    for engine in dict.fromkeys(turn.engine for turn in results.turns):
        found = results.agreement(engine)
        if found and engine != results.reference:
            same = f"{found[0]:4} of {found[1]} answers are those of {results.reference}"
            yield f"  {engine:18}{same}"
