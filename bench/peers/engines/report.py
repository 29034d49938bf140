"""Tables, agreement and targets of `bench.peers.engines`, from what every turn measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OURS = "ours"
REFERENCE = "transformers"


@dataclass(frozen=True)
class Figure:
    """A column: which figure of which workload, and its unit."""

    workload: str
    name: str
    unit: str

    @property
    def title(self) -> str:
        off = ", no cache" if self.workload.endswith(" off") else ""
        return f"{self.name}{off}, {self.unit}"

    def show(self, value: float) -> str:
        """A value in seconds or bytes, in the unit."""
        scaled = value * {"ms": 1e3, "s": 1.0, "MB": 1e-6}[self.unit]
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
    Figure("process", "start", "s"),
    Figure("process", "memory", "MB"),
)


@dataclass
class Turn:
    """What one engine did in one round: outcomes by workload, as the worker sent them."""

    engine: str
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def value(self, figure: Figure) -> float | None:
        """A figure of this turn, seconds or bytes."""
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

    def values(self, engine: str, figure: Figure) -> list[float]:
        """One for each round in which the engine was measured."""
        name = f"{engine}-off" if figure.workload.endswith(" off") else engine
        found = (turn.value(figure) for turn in self.turns if turn.engine == name)
        return [value for value in found if value is not None]

    def median(self, engine: str, figure: Figure) -> float | None:
        """Over the rounds."""
        values = self.values(engine, figure)
        return statistics.median(values) if values else None

    def ratio(self, engine: str, figure: Figure) -> float | None:
        """Ours over theirs."""
        ours, theirs = self.median(OURS, figure), self.median(engine, figure)
        return ours / theirs if ours and theirs else None

    def agreement(self, engine: str) -> tuple[int, int] | None:
        """In how many answers the engine and transformers agree in every round, and of how many."""
        mine = [turn.answers for turn in self.turns if turn.engine == engine]
        reference = [turn.answers for turn in self.turns if turn.engine == REFERENCE]
        if not mine or not reference:
            return None
        same = [
            all(answer == other for other in others)
            for workload, answers in reference[0].items()
            if all(workload in turn for turn in mine)
            for answer, *others in zip(answers, *(turn[workload] for turn in mine), strict=True)
        ]
        return sum(same), len(same)


def tables(results: Results, titles: dict[str, str]) -> Iterator[str]:
    """A table for each workload, lines of text: median, half the range over it, ours / theirs."""
    for workload, title in titles.items():
        columns = [
            figure
            for figure in FIGURES
            if figure.workload.removesuffix(" off") == workload
            and any(results.values(engine, figure) for engine in results.engines)
        ]
        if not columns:
            continue
        yield f"\n{workload}: {title}"
        yield " " * 20 + "".join(f"{figure.title:>24}" for figure in columns)
        for engine in results.engines:
            cells = [_cell(results, engine, figure) for figure in columns]
            yield f"  {engine:18}" + "".join(cells).rstrip()


def _cell(results: Results, engine: str, figure: Figure) -> str:
    """24 characters."""
    values = results.values(engine, figure)
    if not values:
        return " " * 24
    middle = statistics.median(values)
    half = (max(values) - min(values)) / 2 / middle
    spread = f" ±{half * 100:.0f}%" if len(values) > 1 else ""
    ratio = results.ratio(engine, figure)
    compared = f"{ratio:.3f} x" if ratio and engine != OURS else ""
    return f"{figure.show(middle) + spread:>14}{compared:>10}"


def agreements(results: Results) -> Iterator[str]:
    """One line for each engine, those without a cache too."""
    for engine in dict.fromkeys(turn.engine for turn in results.turns):
        found = results.agreement(engine)
        if found and engine != REFERENCE:
            yield f"  {engine:18}{found[0]:4} of {found[1]} answers are those of {REFERENCE}"


def targets(results: Results) -> Iterator[str]:
    """Where we mean to be ahead, and whether we are."""
    for engine in results.engines:
        for figure in FIGURES:
            if not is_target(engine, figure):
                continue
            ratio = results.ratio(engine, figure)
            if ratio is not None:
                verdict = "met   " if ratio < 1 else "MISSED"
                what = f"{figure.workload}, {figure.name}: {OURS} / {engine}"
                yield f"  {verdict} {ratio:7.3f} < 1  {what}"


def is_target(engine: str, figure: Figure) -> bool:
    """transformers in every workload; vLLM where a cache, or a small engine, is to show."""
    if engine.startswith("transformers"):
        return figure.workload in ("W1", "W2", "W3", "W4")
    where = {("W1", "TTFT of a hit"), ("W2", "TTFT from turn 2"), ("W2", "all")}
    return engine == "vllm" and (
        figure.workload == "process" or (figure.workload, figure.name) in where
    )
