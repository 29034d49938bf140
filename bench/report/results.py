"""The results of a benchmark, workload by workload."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from radixcache.bench.replay.figures import Figures

FORMAT = 6
"""The version of the JSON; it changes whenever a key goes."""


@dataclass
class WorkloadReport:
    """The results for one workload.

    Attributes:
        footprint: its distinct tokens.
        unlimited_hits: tokens hit if nothing is ever evicted.
        longest: the most tokens that one request holds.
        optimal_hits: by amount of memory, what eviction that knows the future hits.
        rows: one for each level, memory and scheme.
    """

    name: str
    shape: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    footprint: int
    unlimited_hits: int
    longest: int = 0
    optimal_hits: dict[int, int] = field(default_factory=dict)
    rows: list[Figures] = field(default_factory=list)

    def level(self, level: str) -> list[Figures]:
        return [row for row in self.rows if row.level == level]

    @property
    def main_rows(self) -> list[Figures]:
        """Those of the index level, or of the engine if only that ran."""
        return self.level("index") or self.level("engine")

    @property
    def states(self) -> int:
        """Slots for recurrent states, where a hybrid model is compared."""
        return self.rows[0].states if self.rows else 0

    @property
    def disagreements(self) -> int | None:
        """Requests whose hits differ between the levels; None if only one level ran."""
        index = {(row.scheme, row.memory): row.hits for row in self.level("index")}
        engine = self.level("engine")
        if not index or not engine:
            return None
        return sum(
            a != b
            for row in engine
            for a, b in zip(index[row.scheme, row.memory], row.hits, strict=True)
        )

    @property
    def summary(self) -> str:
        """Describes the workload in one paragraph."""
        unlimited = self.unlimited_hits / self.prompt_tokens
        text = (
            f"{self.shape}: {self.requests:,} requests, {self.prompt_tokens:,} prompt and "
            f"{self.answer_tokens:,} generated tokens, {self.footprint:,} of them distinct; "
            f"unlimited memory hits {unlimited:.1%}."
        )
        if (differ := self.disagreements) is not None:
            text += (
                f" Index and engine level DIFFER in the hits of {differ:,} requests."
                if differ
                else " Index and engine level hit the same tokens, request by request."
            )
        return text


@dataclass
class Report:
    """A whole benchmark.

    Attributes:
        settings: the flags and the machine.
    """

    settings: dict[str, Any]
    workloads: list[WorkloadReport] = field(default_factory=list)

    def to_json(self) -> str:
        """Everything but the hits of single requests."""
        from radixcache.bench.report.verdicts import headline

        workloads = [
            {
                **vars(workload),
                "disagreements": workload.disagreements,
                "headline": headline(workload),
                "rows": [row.to_json() for row in workload.rows],
            }
            for workload in self.workloads
        ]
        found = {"format": FORMAT, "settings": self.settings, "workloads": workloads}
        return json.dumps(found, indent=2)
