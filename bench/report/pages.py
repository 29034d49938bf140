"""Where a report goes: the terminal, a page of HTML, a page of Markdown, with the same tables."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterator
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from radixcache.bench.report.charts import Chart, charts
from radixcache.bench.report.results import Report, WorkloadReport, verdicts
from radixcache.bench.tables import as_markdown, table
from radixcache.errors import InvalidRequest, MissingDependency

TITLE = "Prefix caching: radix against hash-block"


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


def write_report(report: Report, path: Path) -> None:
    """Write one page: .html with the charts inside, .md with PNG files beside it.

    Raises:
        InvalidRequest: it cannot be written.
    """
    drawn = list(charts(report))
    if path.suffix == ".html":
        write(path, _html(report, drawn))
        return
    write(path, _markdown(report, drawn, path.stem))
    for number, chart in enumerate(drawn, 1):
        write(path.with_name(f"{path.stem}-{number}.png"), chart.png)


def write(path: Path, content: str | bytes) -> None:
    """Write a file. Raises InvalidRequest if it cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None


def check_page(path: Path) -> None:
    """Refuse what `write_report` could not do, before anything is measured. Touches nothing.

    Raises:
        InvalidRequest: another ending, or a place that cannot be written.
        MissingDependency: matplotlib is not installed.
    """
    if path.suffix not in (".html", ".md"):
        raise InvalidRequest(f"a report ends in .html or .md, not {path.name!r}")
    if find_spec("matplotlib") is None:
        raise MissingDependency("a report needs matplotlib: pip install '.[bench]' in a checkout")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raises InvalidRequest where nothing could be written, and leaves the place as it is."""
    reason = None
    if path.is_dir():
        reason = "Is a directory"
    elif not path.parent.is_dir():
        reason = "No such file or directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "Permission denied"
    if reason is not None:
        raise InvalidRequest(f"cannot write {path}: {reason}")


def _markdown(report: Report, drawn: list[Chart], stem: str) -> str:
    parts = [f"# {TITLE}", report.conditions]
    for title, notes, tables in sections(report):
        parts += [f"## {title}", *notes, *map(as_markdown, tables)]
    parts += [f"![{chart.title}]({stem}-{number}.png)" for number, chart in enumerate(drawn, 1)]
    return "\n\n".join(parts) + "\n"


def _html(report: Report, drawn: list[Chart]) -> str:
    console = Console(file=StringIO(), record=True, width=150, highlight=False)
    print_report(report, console)
    page = '<!doctype html><html lang="en"><meta charset="utf-8"><title>TITLE</title>'
    page += "<style>{stylesheet}</style><h1>TITLE</h1><pre>{code}</pre>\n"
    tables = console.export_html(code_format=page.replace("TITLE", TITLE))
    images = (
        f'<img alt="{html.escape(chart.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(chart.png).decode()}">\n'
        for chart in drawn
    )
    return tables + "".join(images) + "</html>\n"
