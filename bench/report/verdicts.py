"""Says in a sentence which scheme computes less on a workload, and what spoils its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.results import WorkloadReport
from radixcache.bench.schemes.named import parse_memory
from radixcache.bench.schemes.windows import ALL_KEPT

TIE = 0.02
"""Two schemes tie if their prefilled tokens differ by less than this share."""

ENOUGH = 20
"""Requests with a hit that a verdict needs; with fewer, one or two more could reverse it."""


def headline(workload: WorkloadReport) -> str:
    """Say for each memory whether the best hash-block or the best radix scheme computes less, and
    how much less."""
    if not workload.unlimited_hits:
        return "No prompt begins as one before it does: no scheme can hit anything."
    found: dict[str, list[str]] = {}
    for memory in _memories(workload):
        here = [row for row in workload.main_rows if row.memory == memory]
        if verdict := _by_states(here) if workload.states else _verdict(here):
            found.setdefault(verdict, []).append(memory)
    return "; ".join(f"{', '.join(where)}: {verdict}" for verdict, where in found.items()) + "."


def _verdict(rows: list[Figures]) -> str:
    """Compare, in one memory, the best block scheme and the best tree that refused nothing.

    A scheme without hits is compared only if its whole side has none, and a scheme with a tier,
    which has more memory, never.
    """
    served = [row for row in rows if not row.refused and "+" not in row.scheme]
    sides = [[r for r in served if r.scheme.startswith(kind)] for kind in ("hash-", "radix-")]
    if not all(sides):
        best = max(served, key=lambda row: row.hit_tokens, default=None)
        if best is None:
            return "requests are refused"
        kept = [row for row in served if row.scheme == ALL_KEPT and row is not best]
        beside = "".join(f", {row.scheme} {row.hit_rate:.1%}" for row in kept)
        return f"the best scheme, {best.scheme}, hits {best.hit_rate:.1%}{beside}"
    block, tree = (
        min(side, key=lambda row: (not row.hit_tokens, row.computed_tokens)) for side in sides
    )
    most = max(block, tree, key=lambda row: row.hit_tokens)
    if not most.hit_tokens:
        return "neither hash nor radix hits anything"
    if most.warm < ENOUGH:
        return f"too little data for a verdict, {most.warm} requests hit anything"
    if most.hit_rate < TIE:
        return f"too little data for a verdict, {most.hit_rate:.1%} of the prompt tokens are hit"
    ratio = block.computed_tokens / tree.computed_tokens
    if abs(ratio - 1) <= TIE:
        return f"a tie of {tree.scheme} and {block.scheme}, within {TIE:.0%}"
    winner, loser = (tree, block) if ratio > 1 else (block, tree)
    fewer = f"{1 - min(ratio, 1 / ratio):.0%} fewer prompt tokens than"
    also = "" if loser.hit_tokens else ", which hits nothing"
    return f"{winner.scheme} computes {fewer} {loser.scheme}{also}"


def _by_states(rows: list[Figures]) -> str:
    """Say how much each rule computes for a hybrid model, the least first."""
    served = [row for row in rows if not row.refused]
    if not served:
        return "requests are refused"
    ranked = sorted(served, key=lambda row: row.computed_tokens)  # stable: kv-alone is first
    shares = ", ".join(f"{row.scheme} {row.computed_share:.1%}" for row in ranked)
    return f"computed of the prompt tokens with {rows[0].states:,} states: {shares}"


def _memories(workload: WorkloadReport) -> dict[str, None]:
    return dict.fromkeys(row.memory for row in workload.main_rows)


def remarks(workload: WorkloadReport) -> list[str]:
    """Remarks on effects that spoil figures, each with the memory sizes concerned."""
    found: dict[str, list[str]] = {}
    for memory in _memories(workload):
        rows = [row for row in workload.main_rows if row.memory == memory]
        for reason in _reasons(workload, rows):
            found.setdefault(reason, []).append(memory)
    return [f"{', '.join(memories)}: {reason}" for reason, memories in found.items()]


def _reasons(workload: WorkloadReport, rows: list[Figures]) -> Iterator[str]:
    given, asked = rows[0].memory_tokens, parse_memory(rows[0].memory)
    share = asked.amount * workload.footprint if asked.unit == "share" else given
    if given > 1.05 * share:
        yield (
            f"these are {given:,} tokens, not {share:,.0f}: all schemes get the same memory, in "
            f"whole pages, and at least two of the largest."
        )
    if tiers := [row.scheme for row in rows if "+" in row.scheme]:
        yield f"{', '.join(tiers)} has more memory in a tier, and loads from it take no time here."
    if any(row.refused for row in rows):
        yield (
            f"refused requests do not fit into {given:,} tokens less a page (the longest needs "
            f"{workload.longest:,}); they hit and compute nothing."
        )
    caching = [row for row in rows if row.scheme != "none" and not row.refused]
    cold = [row.scheme for row in caching if not row.hit_tokens]
    if cold and not workload.unlimited_hits:
        yield "nothing is hit, because no two prompts begin alike."
    elif cold and len(cold) == len(caching):
        yield "nothing is hit: the requests in flight fill the memory, and nothing else is kept."
    elif cold:
        yield f"{', '.join(cold)} hit nothing: less than a block is shared, or it is gone by then."
    if preempted := [row.scheme for row in rows if row.preemptions]:
        yield (
            f"too little for the requests in flight ({', '.join(preempted)}): preempted ones "
            f"compute again, and prompts are prefilled more than once."
        )
    else:
        yield from _under_lru(caching, workload.optimal_hits.get(given, 0))
    best = workload.optimal_hits.get(given, math.inf)
    if above := [row.scheme for row in rows if row.hit_tokens > best and not row.has_tier]:
        yield (
            f"{', '.join(above)} above the optimum, which serves one request after the other in "
            f"order of arrival: here requests overtake each other, and an answer takes memory only "
            f"as it grows."
        )


def _under_lru(rows: list[Figures], optimum: int) -> Iterator[str]:
    """Why hits are few, or fewer than in blocks of the same size."""
    blocks = {row.page_size: row for row in rows if row.scheme.startswith("hash-")}
    for tree in rows:
        block = blocks.get(tree.page_size) if tree.scheme.startswith("radix-") else None
        emptier = block is not None and (tree.empty_share or 0) > (block.empty_share or 0)
        if block and emptier and block.computed_tokens < tree.computed_tokens * (1 - TIE):
            yield (
                f"{tree.scheme} computes more than {block.scheme}: the half-filled pages that it "
                f"keeps ({tree.empty_share:.1%} of its slots are empty) drive out full ones."
            )
    most = max(rows, key=lambda row: row.hit_tokens, default=None)
    if most is not None and most.hit_rate > TIE and 2 * most.hit_tokens < optimum:
        yield (
            "no scheme hits half of the optimum: all evict the least recently used tokens (LRU), "
            "which return no later than others here, in a cycle of prompts even first."
        )
