"""Shows a report on a terminal: tables that fit 80 columns, and remarks."""

from __future__ import annotations

from rich.console import Console

from radixcache.bench.report.columns import REMARK, tables
from radixcache.bench.report.results import Report
from radixcache.bench.report.verdicts import headline, remarks
from radixcache.bench.tables import plain, table


def print_report(report: Report, console: Console) -> None:
    """Show the tables of hits and times, remarks, and last which scheme computes less."""
    for workload in report.workloads:
        console.rule(plain(workload.name), align="left")
        console.print(workload.summary, markup=False)
        for columns, rows in tables(workload):
            shown = [column for column in columns if not column.on_page_only]
            console.print(
                table(
                    [column.title for column in shown],
                    ([column.text(workload, row) for column in shown] for row in rows),
                    left=2,
                    words=REMARK in shown,
                )
            )
        if lines := remarks(workload):
            console.print(*lines, sep="\n", markup=False)
    settings = [f"{key} {value}" for key, value in report.settings.items() if key != "command"]
    console.print(", ".join(settings), style="dim", markup=False)
    console.rule("What it shows", align="left")
    for workload in report.workloads:
        console.print(plain(f"{workload.name}: {headline(workload)}"))
