"""What a benchmark has found, workload by workload, and its verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixcache.bench.replay.figures import Figures
from radixcache.bench.replay.replicas import RoutingFigures
from radixcache.bench.report.family import story
from radixcache.bench.report.sharing import Segment

TIE = 0.02
"""Two schemes tie if their prefilled tokens differ by less than this share."""

ENOUGH = 20
"""Requests that hit anything; of fewer, one or two more could turn a verdict round."""


@dataclass
class WorkloadReport:
    """All that was found about one workload.

    Attributes:
        footprint: its distinct tokens.
        unlimited_hits: tokens hit if nothing is ever evicted.
        longest: the most tokens that one request holds.
        optimal_hits: by amount of memory, what eviction that knows the future hits.
        curves: by name, (memory in tokens, hit rate) under LRU, from one pass.
        shared: which tokens how many requests have in common.
        rows: one for each level, memory and scheme.
        routing: with several replicas, one for each memory, scheme and way to route.
        differing: `disagreements`, if this was read from a file: that has no hits of requests.
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
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    shared: list[Segment] = field(default_factory=list)
    rows: list[Figures] = field(default_factory=list)
    routing: list[RoutingFigures] = field(default_factory=list)
    differing: int | None = None

    def level(self, level: str) -> list[Figures]:
        """The rows of one level."""
        return [row for row in self.rows if row.level == level]

    @property
    def main_rows(self) -> list[Figures]:
        """Those of the index level, or of the engine if only that ran."""
        return self.level("index") or self.level("engine")

    @property
    def disagreements(self) -> int | None:
        """Requests whose hits differ between the levels; None if only one level ran."""
        index = {(row.scheme, row.memory): row.hits for row in self.level("index") if row.hits}
        pairs = [
            (index[row.scheme, row.memory], row.hits)
            for row in self.level("engine")
            if (row.scheme, row.memory) in index
        ]
        if not pairs:
            return self.differing
        return sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))


@dataclass
class Report:
    """A whole benchmark.

    Attributes:
        settings: what was asked for, and on what it ran.
    """

    settings: dict[str, Any]
    workloads: list[WorkloadReport] = field(default_factory=list)

    @property
    def conditions(self) -> str:
        """The settings but for the command, in one line."""
        return ", ".join(f"{k} {v}" for k, v in self.settings.items() if k != "command")


def duels(workload: WorkloadReport) -> Iterator[tuple[Figures, Figures]]:
    """For each memory the best hash-block and the best radix row, of those that refused nothing.

    One that hits nothing is taken only where all of its side hit nothing.
    """
    for memory in dict.fromkeys(row.memory for row in workload.main_rows):
        here = [row for row in workload.main_rows if row.memory == memory and not row.refused]
        sides = [[r for r in here if r.scheme.startswith(kind)] for kind in ("hash-", "radix-")]
        if all(sides):
            block, tree = (
                min(side, key=lambda row: (not row.hit_tokens, row.computed_tokens))
                for side in sides
            )
            yield block, tree


def winner(block: Figures, tree: Figures) -> str:
    """Who prefills less: "radix" or "blocks", or a "tie".

    "only radix" and "only blocks" if the other side hits nothing, "nothing" if neither hits, and
    "little" if that is too little data to tell.
    """
    best = max(block, tree, key=lambda row: row.hit_tokens)
    ratio = block.computed_tokens / tree.computed_tokens
    if not best.hit_tokens:
        return "nothing"
    if best.warm < ENOUGH or best.hit_rate < TIE:
        return "little"
    if abs(ratio - 1) <= TIE:
        return "tie"
    side, loser = ("radix", block) if ratio > 1 else ("blocks", tree)
    return side if loser.hit_tokens else f"only {side}"


def scarcity(*rows: Figures) -> str:
    """What is hit where that is too little to tell who is better."""
    best = max(rows, key=lambda row: row.hit_tokens)
    if best.warm >= ENOUGH:
        return f"{100 * best.hit_rate:.1f} % of the prompt tokens hit"
    return f"{best.warm} requests hit anything"


def verdicts(workload: WorkloadReport) -> list[str]:
    """For each memory: which of the best hash-block and the best radix scheme computes less, and
    where hash-block is no worse, or wastes less memory, with pages of the same size.
    """
    found = []
    for block, tree in duels(workload):
        memory = block.memory
        here = [row for row in workload.main_rows if row.memory == memory and not row.refused]
        ratio = block.computed_tokens / tree.computed_tokens
        more = f"{abs(ratio - 1):.1%} {'more' if ratio >= 1 else 'less'}"
        won, one, other = winner(block, tree), block.scheme, tree.scheme
        word = {
            "blocks": f"hash-block wins: {one} prefills {more} than {other}",
            "tie": f"a tie: {one} prefills {more} than {other}",
            "radix": f"radix wins: {one} prefills {ratio:.2f}x the tokens of {other}",
            "only radix": f"only radix hits anything: {other} {tree.hit_rate:.1%}",
            "only blocks": f"only hash-block hits anything: {one} {block.hit_rate:.1%}",
            "nothing": "nothing is hit",
            "little": f"too little data for a verdict: {scarcity(block, tree)}",
        }[won]
        found.append(f"{workload.name}, {memory}: {word}")
        if won in ("nothing", "little"):
            continue
        others = _page_for_page(here, (block, tree))
        found += [f"{workload.name}, {memory}: {line}" for line in others]
    return found + story(workload.main_rows)


def _page_for_page(rows: list[Figures], told: tuple[Figures, Figures]) -> Iterator[str]:
    """Where hash-block is at least as good as the tree over pages of the same size; `told` are two
    whose prefilled tokens have been compared already.
    """
    by_scheme = {row.scheme: row for row in rows}
    for tree in rows:
        block = by_scheme.get(f"hash-{tree.page_size}")
        if tree.scheme != f"radix-{tree.page_size}" or block is None:
            continue
        ratio = block.computed_tokens / tree.computed_tokens
        if ratio <= 1 + TIE and block.hit_tokens and told != (block, tree):
            yield f"page for page, {block.scheme} prefills {ratio:.3f}x the tokens of {tree.scheme}"
        if block.empty_share is not None and tree.empty_share is not None:
            more = tree.empty_share - block.empty_share
            if more > TIE:
                yield (
                    f"page for page, {block.scheme} wastes less: {block.empty_share:.1%} of its "
                    f"slots are empty, {tree.empty_share:.1%} of {tree.scheme}'s"
                )
