"""The charts of a report, as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.results import Report, WorkloadReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Chart(NamedTuple):
    """One image."""

    title: str
    png: bytes


def charts(report: Report) -> Iterator[Chart]:
    """For each workload its hit rates, what each turn prefills, and the times of the engine."""
    for workload in report.workloads:
        timed = workload.level("engine")
        rows = workload.level("index") or timed
        if rows:
            yield Chart(f"{workload.name}: hit rate over memory", _png(_hit_rates, workload, rows))
        if any(len(row.computed_by_turn) > 1 for row in rows):
            yield Chart(f"{workload.name}: prefill tokens by turn", _png(_by_turn, rows))
        if timed:
            yield Chart(f"{workload.name}: time to first token", _png(_ttfts, timed))


def _hit_rates(axes: Axes, workload: WorkloadReport, rows: list[Figures]) -> None:
    for name, points in workload.curves.items():
        axes.plot(*zip(*points, strict=True), ":", linewidth=1, label=f"{name}, LRU, one pass")
    for scheme in dict.fromkeys(row.scheme for row in rows):
        at = sorted((row.memory_tokens, row.hit_rate) for row in rows if row.scheme == scheme)
        axes.plot(*zip(*at, strict=True), "o-", markersize=4, label=scheme)
    best = sorted((m, hits / workload.prompt_tokens) for m, hits in workload.optimal_hits.items())
    if best:
        axes.plot(*zip(*best, strict=True), "k--", label="offline optimum")
    unlimited = workload.unlimited_hits / workload.prompt_tokens
    axes.axhline(unlimited, color="grey", label="unlimited memory")
    axes.set_xlabel("KV memory, tokens")
    axes.set_ylabel("share of prompt tokens hit")
    axes.set_ylim(0, 1)


def _by_turn(axes: Axes, rows: list[Figures]) -> None:
    most = max(row.memory_tokens for row in rows)
    for row in rows:
        if row.memory_tokens == most:
            turns = range(1, len(row.computed_by_turn) + 1)
            axes.plot(turns, row.computed_by_turn, "o-", markersize=4, label=row.scheme)
    axes.set_xlabel("turn")
    axes.set_ylabel(f"prefilled tokens per request, {most:,} tokens of memory")
    axes.set_ylim(bottom=0)


def _ttfts(axes: Axes, rows: list[Figures]) -> None:
    most = max(row.memory_tokens for row in rows)
    for row in rows:
        if row.memory_tokens == most and row.engine is not None:
            times = sorted(1000 * time for time in row.engine.ttfts)
            shares = [(n + 1) / len(times) for n in range(len(times))]
            axes.plot(times, shares, label=row.scheme)
    axes.set_xlabel(f"time to first token, ms, {most:,} tokens of memory")
    axes.set_ylabel("share of requests")
    axes.set_xscale("log")


def _png(draw: Callable[..., None], *what: object) -> bytes:
    """What `draw` draws of `what`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    draw(axes, *what)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
