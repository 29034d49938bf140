"""A report on a terminal: tables that are whole at 80 columns, remarks, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.columns import share
from radixcache.bench.report.headline import headline, milliseconds
from radixcache.bench.report.results import (
    TIE,
    Report,
    WorkloadReport,
    duels,
    scarcity,
    verdicts,
    winner,
)
from radixcache.bench.schemes.named import parse_memory
from radixcache.bench.tables import plain, table


def index_table(workload: WorkloadReport) -> Table:
    """Hits and work at index level, with what spoils a figure beside it."""
    found = workload.level("index")
    said = any(map(_remark, found))
    header = ["memory", "scheme", "hit", "of optimum", "prefilled", "cache µs"]
    rows = [
        [
            row.memory,
            row.scheme,
            f"{row.hit_rate:.1%}",
            share(row.hit_tokens, workload.optimal_hits.get(row.memory_tokens)),
            f"{row.computed_tokens:,}",
            f"{row.cache_us or 0:,.0f}",
            *([_remark(row)] if said else []),
        ]
        for row in found
    ]
    return table([*header, "remark"] if said else header, rows, left=2, words=said)


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


def routing_table(workload: WorkloadReport) -> Table:
    """Hits, mean and late times to first token, and balance of each way to route."""
    header = ["memory", "cache", "routing", "hit", "TTFT", "p99", "busiest", "refused"]
    rows = [
        [
            row.memory,
            row.scheme,
            row.routing,
            f"{row.hit_rate:.1%}",
            *(_time(t) if row.ttfts else "–" for t in (row.ttft_mean, row.ttft_p99)),
            f"{row.imbalance:.2f}",
            f"{row.refused:,}",
        ]
        for row in workload.routing
    ]
    return table(header, rows, left=3)


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else milliseconds(seconds)


def _remark(row: Figures) -> str:
    counts = {"refused": row.refused, "preempted": row.preemptions}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def remarks(workload: WorkloadReport) -> list[str]:
    """What spoils figures: a sentence for each reason, and in which memories it holds."""
    found: dict[str, list[str]] = {}
    for memory in dict.fromkeys(row.memory for row in workload.main_rows):
        rows = [row for row in workload.main_rows if row.memory == memory]
        for reason in _reasons(workload, rows):
            found.setdefault(reason, []).append(memory)
    return [f"{', '.join(memories)}: {reason}" for reason, memories in found.items()]


def _reasons(workload: WorkloadReport, rows: list[Figures]) -> Iterator[str]:
    """What spoils the figures of one memory."""
    given, asked = rows[0].memory_tokens, parse_memory(rows[0].memory)
    share = asked.amount * workload.footprint if asked.unit == "share" else given
    if given > 1.05 * share:
        yield (
            f"these are {given:,} tokens, not {share:,.0f}: all schemes get the same memory, in "
            f"whole pages, and at least two of the largest."
        )
    if any(row.refused for row in rows):
        yield (
            f"refused requests do not fit into {rows[0].memory_tokens:,} tokens less a page (the "
            f"longest needs {workload.longest:,}); they hit and compute nothing."
        )
    caching = [row for row in rows if row.scheme != "none" and not row.refused]
    cold = [row.scheme for row in caching if not row.hit_tokens]
    if cold and not workload.unlimited_hits:
        yield "nothing is hit, because no two prompts begin alike."
    elif cold and len(cold) == len(caching):
        yield "nothing is hit: the requests in flight fill the memory, and nothing else is kept."
    elif cold:
        yield f"{', '.join(cold)} hit nothing: less than a block is shared, or it is gone by then."
    if not any(row.preemptions for row in rows):
        yield from _under_lru(caching, workload.optimal_hits.get(given, 0))
    if preempted := [row.scheme for row in rows if row.preemptions]:
        yield (
            f"too little for the requests in flight ({', '.join(preempted)}): preempted ones "
            f"compute again, and prompts are prefilled more than once."
        )
    best = workload.optimal_hits.get(rows[0].memory_tokens, 0)
    if above := [row.scheme for row in rows if row.hit_tokens > best]:
        yield (
            f"{', '.join(above)} above the optimum, which serves one request after the other in "
            f"order of arrival: in flight together, some overtake others, and an answer takes "
            f"memory only as it grows."
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
            "no scheme hits half of the optimum: all evict what was used least recently (LRU), and "
            "that is asked for again no later than the rest, in a cycle of prompts even first."
        )


def print_report(report: Report, console: Console) -> None:
    """Show the tables of hits and times, and what is to be said about them."""
    for workload in report.workloads:
        console.rule(plain(workload.name), align="left")
        console.print(
            f"{workload.shape}: {workload.requests:,} requests, {workload.prompt_tokens:,} prompt "
            f"and {workload.answer_tokens:,} generated tokens, {workload.footprint:,} of them "
            f"distinct; unlimited memory hits "
            f"{share(workload.unlimited_hits, workload.prompt_tokens)}.",
            markup=False,
        )
        tables = index_table(workload), engine_table(workload), routing_table(workload)
        console.print(*(shown for shown in tables if shown.row_count))
        notes = []
        if (differ := workload.disagreements) is not None:
            notes.append(
                "Index and engine level hit the same tokens, request by request."
                if not differ
                else f"Index and engine level DIFFER in {differ} requests."
            )
        if workload.routing:
            notes.append(headline(workload))
        notes += [*remarks(workload), *verdicts(workload)]
        console.print(*notes, sep="\n", markup=False)
    console.print(report.conditions, style="dim", markup=False)


def print_verdict(report: Report, console: Console) -> None:
    """Who prefills less, in three lines, if both sides ran; in a fourth where nobody can tell."""
    sides = {"radix": "radix less", "tie": "a tie", "blocks": "hash-block less"}
    won: dict[str, list[str]] = {name: [] for name in sides.values()}
    for workload in report.workloads:
        found: dict[str, list[tuple[str, str]]] = {}
        for block, tree in duels(workload):
            only, _, side = winner(block, tree).rpartition(" ")
            said = f"{block.computed_tokens / tree.computed_tokens:.2f}x"
            if side not in sides:
                said = scarcity(block, tree)
            elif only:
                said = "the other hits nothing"
            found.setdefault(sides.get(side, "too little data"), []).append((block.memory, said))
        for name, pairs in found.items():
            at = " at " + ", ".join(memory for memory, _ in pairs) if len(found) > 1 else ""
            told = ", ".join(dict.fromkeys(said for _, said in pairs))
            won.setdefault(name, []).append(f"{workload.name}{at} ({told})")
    if not any(won.values()):
        return
    console.rule("Prefilled by the best hash-block, of the best radix's", align="left")
    lines = Table.grid(padding=(0, 2))
    for side, where in won.items():
        lines.add_row(f"{side}:", Text(", ".join(where) or "nowhere"))
    console.print(lines)
