"""The report of a benchmark: tables for the terminal or a page, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from radixcache.bench.replay.figures import Figures
from radixcache.bench.tables import as_markdown, table
from radixcache.errors import InvalidRequest

TITLE = "Prefix caching: radix against hash-block"

TIE = 0.02
"""Two modes tie if their prefilled tokens differ by less than this share."""


@dataclass
class WorkloadReport:
    """All that was found about one workload.

    Attributes:
        footprint: its distinct tokens.
        unlimited_hits: tokens hit if nothing is ever evicted.
        optimal_hits: by amount of memory, what eviction that knows the future hits.
        curves: by name, (memory in tokens, hit rate) under LRU, from one pass.
        rows: one for each level, memory and mode.
    """

    name: str
    shape: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    footprint: int
    unlimited_hits: int
    optimal_hits: dict[int, int] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    rows: list[Figures] = field(default_factory=list)

    def level(self, level: str) -> list[Figures]:
        """The rows of one level."""
        return [row for row in self.rows if row.level == level]

    @property
    def disagreements(self) -> int | None:
        """Requests whose hits differ between the levels; None if only one level ran."""
        index = {(row.mode, row.memory): row.hits for row in self.level("index")}
        pairs = [
            (index[row.mode, row.memory], row.hits)
            for row in self.level("engine")
            if (row.mode, row.memory) in index
        ]
        if not pairs:
            return None
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
        """The settings, in one line."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())

    def to_json(self) -> str:
        """Everything but the hits of single requests."""
        return json.dumps(
            {
                "settings": self.settings,
                "workloads": [
                    {
                        **{k: v for k, v in vars(workload).items() if k != "rows"},
                        "disagreements": workload.disagreements,
                        "verdicts": verdicts(workload),
                        "rows": [row.to_json() for row in workload.rows],
                    }
                    for workload in self.workloads
                ],
            },
            indent=2,
        )


def verdicts(workload: WorkloadReport) -> list[str]:
    """For each memory: which of the best hash-block and the best radix mode computes less, and
    where hash-block is no worse, or wastes less memory, with pages of the same size.
    """
    found = []
    rows = workload.level("index") or workload.level("engine")
    for memory in dict.fromkeys(row.memory for row in rows):
        here = [row for row in rows if row.memory == memory and not row.refused]
        blocks = [row for row in here if row.mode.startswith("hash-")]
        trees = [row for row in here if row.mode.startswith("radix-")]
        if not blocks or not trees:
            continue
        block, tree = (min(side, key=lambda row: row.computed_tokens) for side in (blocks, trees))
        ratio = block.computed_tokens / tree.computed_tokens
        if ratio < 1 - TIE:
            word = f"hash-block wins: {block.mode} prefills {1 - ratio:.1%} less than {tree.mode}"
        elif ratio <= 1 + TIE:
            more = f"{abs(ratio - 1):.1%} {'more' if ratio >= 1 else 'less'}"
            word = f"a tie: {block.mode} prefills {more} than {tree.mode}"
        else:
            word = f"radix wins: {block.mode} prefills {ratio:.2f}x the tokens of {tree.mode}"
        found.append(f"{workload.name}, {memory}: {word}")
        found += [f"{workload.name}, {memory}: {line}" for line in _page_for_page(here)]
    return found


def _page_for_page(rows: list[Figures]) -> Iterator[str]:
    """Where hash-block is at least as good as the tree over pages of the same size."""
    by_mode = {row.mode: row for row in rows}
    for tree in rows:
        block = by_mode.get(f"hash-{tree.page_size}")
        if tree.mode != f"radix-{tree.page_size}" or block is None:
            continue
        ratio = block.computed_tokens / tree.computed_tokens
        if ratio <= 1 + TIE:
            yield f"{block.mode} prefills {ratio:.3f}x the tokens of {tree.mode}"
        if block.empty_share is not None and tree.empty_share is not None:
            more = tree.empty_share - block.empty_share
            if more > TIE:
                yield (
                    f"{block.mode} leaves {block.empty_share:.1%} of its slots empty, "
                    f"{tree.mode} {tree.empty_share:.1%}"
                )


# What it says.


def index_table(workload: WorkloadReport) -> Table:
    """Hits, work and memory at index level."""
    header = ["memory", "mode", "hit", "of unlimited", "of optimal", "prefilled", "doubled"]
    header += ["evicted", "peak pages", "empty slots", "cache µs", "refused"]
    rows = [
        [
            row.memory,
            row.mode,
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
    header = ["memory", "mode", "hit", "prefilled", "TTFT p50", "p90", "p99", "tokens/s", "range"]
    rows = []
    for row in workload.level("engine"):
        assert row.engine is not None
        timed, spread = row.engine, row.engine.throughput
        ttfts = [
            f"{1000 * p.median:,.1f} ms" for p in (timed.ttft_p50, timed.ttft_p90, timed.ttft_p99)
        ]
        served = [f"{spread.median:,.0f}", f"{spread.low:,.0f}–{spread.high:,.0f}"]
        hit = [f"{row.hit_rate:.1%}", f"{row.computed_tokens:,}"]
        rows.append([row.memory, row.mode, *hit, *ttfts, *served])
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


# Where it goes: a terminal, a page of HTML, a page of Markdown.


def print_report(report: Report, console: Console) -> None:
    """Show the tables on a terminal."""
    for title, notes, tables in sections(report):
        console.rule(title, align="left")
        console.print(*notes, sep="\n", markup=False)
        console.print(*tables)
    console.print(report.conditions, style="dim", markup=False)


def write_report(report: Report, path: Path) -> None:
    """Write what the terminal shows as one page, .html or .md.

    Raises:
        InvalidRequest: another ending, or a place that cannot be written.
    """
    if path.suffix not in (".html", ".md"):
        raise InvalidRequest(f"a report ends in .html or .md, not {path.name!r}")
    write(path, _html(report) if path.suffix == ".html" else _markdown(report))


def write(path: Path, text: str) -> None:
    """Write a file. Raises InvalidRequest if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None


def _markdown(report: Report) -> str:
    parts = [f"# {TITLE}", report.conditions]
    for title, notes, tables in sections(report):
        parts += [f"## {title}", *notes, *map(as_markdown, tables)]
    return "\n\n".join(parts) + "\n"


def _html(report: Report) -> str:
    console = Console(file=StringIO(), record=True, width=150, highlight=False)
    print_report(report, console)
    page = '<!doctype html><html lang="en"><meta charset="utf-8"><title>TITLE</title>'
    page += "<style>{stylesheet}</style><h1>TITLE</h1><pre>{code}</pre></html>\n"
    return console.export_html(code_format=page.replace("TITLE", TITLE))
