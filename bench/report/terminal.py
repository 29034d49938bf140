"""A report on a terminal: tables and remarks, workload by workload."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from radixcache.bench.report.results import Report, WorkloadReport, verdicts
from radixcache.bench.tables import table


def index_table(workload: WorkloadReport) -> Table:
    """Hits, work and memory at index level."""
    header = ["memory", "scheme", "hit", "of unlimited", "of optimal", "prefilled", "doubled"]
    header += ["evicted", "peak pages", "empty slots", "cache µs", "refused"]
    rows = [
        [
            row.memory,
            row.scheme,
            f"{row.hit_rate:.1%}",
            _share(row.hit_tokens, workload.unlimited_hits),
            _share(row.hit_tokens, workload.optimal_hits.get(row.memory_tokens, 0)),
            f"{row.computed_tokens:,}",
            f"{row.doubled_tokens or 0:,}",
            f"{row.evicted_tokens:,}",
            f"{row.peak_used_pages or 0:,}",
            f"{row.empty_share or 0:.1%}",
            f"{row.cache_us or 0:,.0f}",
            f"{row.refused:,}",
        ]
        for row in workload.level("index")
    ]
    return table(header, rows, left=2)


def engine_table(workload: WorkloadReport) -> Table:
    """Times at engine level: medians over the repeats, and the range of the throughput."""
    header = ["memory", "scheme", "hit", "prefilled", "TTFT p50", "p90", "p99", "tokens/s", "range"]
    rows = []
    for row in workload.level("engine"):
        assert row.engine is not None
        timed, spread = row.engine, row.engine.throughput
        ttfts = [
            f"{1000 * p.median:,.1f} ms" for p in (timed.ttft_p50, timed.ttft_p90, timed.ttft_p99)
        ]
        served = [f"{spread.median:,.0f}", f"{spread.low:,.0f}–{spread.high:,.0f}"]
        hit = [f"{row.hit_rate:.1%}", f"{row.computed_tokens:,}"]
        rows.append([row.memory, row.scheme, *hit, *ttfts, *served])
    return table(header, rows, left=2)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def sections(report: Report) -> Iterator[tuple[str, list[str], list[Table]]]:
    """Title, remarks and tables of every part of the report."""
    for workload in report.workloads:
        notes = [
            f"{workload.shape}: {workload.requests:,} requests, {workload.prompt_tokens:,} prompt "
            f"and {workload.answer_tokens:,} generated tokens, {workload.footprint:,} of them "
            f"distinct; unlimited memory hits "
            f"{_share(workload.unlimited_hits, workload.prompt_tokens)}."
        ]
        if (differ := workload.disagreements) is not None:
            notes.append(
                "Index and engine level hit the same tokens, request by request."
                if not differ
                else f"Index and engine level DIFFER in {differ} requests."
            )
        tables = [index_table(workload), engine_table(workload)]
        yield workload.name, [*notes, *verdicts(workload)], [t for t in tables if t.row_count]


def print_report(report: Report, console: Console) -> None:
    """Show the tables on a terminal."""
    for title, notes, tables in sections(report):
        console.rule(title, align="left")
        console.print(*notes, sep="\n", markup=False)
        console.print(*tables)
    console.print(report.conditions, style="dim", markup=False)
