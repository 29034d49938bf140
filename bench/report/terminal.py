"""A report on a terminal: tables that are whole at 80 columns, remarks, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.results import TIE, Report, WorkloadReport, duels, verdicts
from radixcache.bench.tables import table


def index_table(workload: WorkloadReport) -> Table:
    """Hits and work at index level, with what spoils a figure beside it."""
    header = ["memory", "scheme", "hit", "of optimum", "prefilled", "cache µs", "remark"]
    rows = [
        [
            row.memory,
            row.scheme,
            f"{row.hit_rate:.1%}",
            _share(row.hit_tokens, workload.optimal_hits.get(row.memory_tokens, 0)),
            f"{row.computed_tokens:,}",
            f"{row.cache_us or 0:,.0f}",
            _remark(row),
        ]
        for row in workload.level("index")
    ]
    return table(header, rows, left=2, words=1)


def memory_table(workload: WorkloadReport) -> Table:
    """What became of the memory at index level."""
    header = ["memory", "scheme", "of unlimited", "doubled", "evicted", "peak pages", "empty slots"]
    rows = [
        [
            row.memory,
            row.scheme,
            _share(row.hit_tokens, workload.unlimited_hits),
            f"{row.doubled_tokens or 0:,}",
            f"{row.evicted_tokens:,}",
            f"{row.peak_used_pages or 0:,}",
            f"{row.empty_share or 0:.1%}",
        ]
        for row in workload.level("index")
    ]
    return table(header, rows, left=2)


def engine_table(workload: WorkloadReport) -> Table:
    """Times at engine level: medians over the repeats, and half the range of the throughput."""
    header = ["memory", "scheme", "hit", "prefilled", "TTFT ms", "p99", "tokens/s", "range"]
    rows = []
    for row in workload.level("engine"):
        assert row.engine is not None
        timed, spread = row.engine, row.engine.throughput
        ttfts = [f"{1000 * p.median:,.1f}" for p in (timed.ttft_p50, timed.ttft_p99)]
        half = (spread.high - spread.low) / 2 / spread.median
        served = [f"{spread.median:,.0f}", f"± {half:.0%}"]
        hit = [f"{row.hit_rate:.1%}", f"{row.computed_tokens:,}"]
        rows.append([row.memory, row.scheme, *hit, *ttfts, *served])
    return table(header, rows, left=2)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _remark(row: Figures) -> str:
    counts = {"refused": row.refused, "preempted": row.preemptions}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def remarks(workload: WorkloadReport) -> list[str]:
    """What spoils figures, in a sentence for each memory and reason."""
    found = []
    for memory in dict.fromkeys(row.memory for row in workload.main_rows):
        rows = [row for row in workload.main_rows if row.memory == memory]
        for row in rows:
            if row.refused:
                found.append(
                    f"{memory}: {row.refused:,} of {row.requests:,} requests do not fit into "
                    f"{row.memory_tokens:,} tokens and are refused (the longest needs "
                    f"{workload.longest:,}); the figures are of the others."
                )
                break
        found += (f"{memory}: {reason}" for reason in _nothing_hit(workload, rows))
        if preempted := [row.scheme for row in rows if row.preemptions]:
            found.append(
                f"{memory}: too little for the requests in flight ({', '.join(preempted)}); "
                f"preempted ones compute again, so prompts are prefilled more than once."
            )
        best = workload.optimal_hits.get(rows[0].memory_tokens, 0)
        if above := [row.scheme for row in rows if row.hit_tokens > best]:
            found.append(
                f"{memory}: {', '.join(above)} above the optimum, which serves one request after "
                f"the other in order of arrival: in flight together, some overtake others, and an "
                f"answer takes memory only as it grows."
            )
    return found


def _nothing_hit(workload: WorkloadReport, rows: list[Figures]) -> Iterator[str]:
    """Why schemes that cache hit nothing at all."""
    caching = [row for row in rows if row.scheme != "none" and row.refused < row.requests]
    cold = [row.scheme for row in caching if not row.hit_tokens]
    if not cold:
        return
    if not workload.unlimited_hits:
        yield "nothing is hit, because no two prompts begin alike."
    elif len(cold) == len(caching):
        yield "nothing is hit: requests in flight fill the memory, and nothing is kept for later."
    else:
        names = ", ".join(cold)
        yield f"{names} hit nothing: what prompts share is less than a block, or gone by then."


def sections(report: Report, *, whole: bool = True) -> Iterator[tuple[str, list[str], list[Table]]]:
    """Title, remarks and tables of every part of the report.

    Args:
        whole: with the tables of what became of the memory.
    """
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
        tables[1:1] = [memory_table(workload)] if whole else []
        notes += [*remarks(workload), *verdicts(workload)]
        yield workload.name, notes, [t for t in tables if t.row_count]


def print_report(report: Report, console: Console, *, whole: bool = False) -> None:
    """Show the tables on a terminal: those of hits and times, or all of them."""
    for title, notes, tables in sections(report, whole=whole):
        console.rule(title, align="left")
        console.print(notes[0], markup=False)
        console.print(*tables)
        console.print(*notes[1:], sep="\n", markup=False)
    console.print(report.conditions, style="dim", markup=False)


def print_verdict(report: Report, console: Console) -> None:
    """Who prefills less, in three lines, if both sides ran."""
    won: dict[str, list[str]] = {"radix less": [], "a tie": [], "hash-block less": []}
    for workload in report.workloads:
        found: dict[str, list[tuple[str, float]]] = {}
        for block, tree in duels(workload):
            ratio = block.computed_tokens / tree.computed_tokens
            side = "radix less" if ratio > 1 else "hash-block less"
            side = "a tie" if abs(ratio - 1) <= TIE else side
            found.setdefault(side, []).append((block.memory, ratio))
        for side, pairs in found.items():
            ratios = dict.fromkeys(f"{ratio:.2f}x" for _, ratio in pairs)
            at = " at " + ", ".join(memory for memory, _ in pairs) if len(found) > 1 else ""
            won[side].append(f"{workload.name}{at} ({', '.join(ratios)})")
    if not any(won.values()):
        return
    console.rule("Prefilled by the best hash-block, of the best radix's", align="left")
    lines = Table.grid(padding=(0, 2))
    for side, where in won.items():
        lines.add_row(f"{side}:", Text(", ".join(where) or "nowhere"))
    console.print(lines)
