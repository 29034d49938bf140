"""A report as a page of HTML or of Markdown, with the terminal's tables."""

from __future__ import annotations

import base64
import html
import os
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from rich.console import Console

from radixcache.bench.report.charts import Chart, charts
from radixcache.bench.report.results import Report
from radixcache.bench.report.terminal import print_report, sections
from radixcache.bench.tables import as_markdown
from radixcache.errors import InvalidRequest, MissingDependency

TITLE = "Prefix caching: radix against hash-block"


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
    print_report(report, console, whole=True)
    page = '<!doctype html><html lang="en"><meta charset="utf-8"><title>TITLE</title>'
    page += "<style>{stylesheet}</style><h1>TITLE</h1><pre>{code}</pre>\n"
    tables = console.export_html(code_format=page.replace("TITLE", TITLE))
    images = (
        f'<img alt="{html.escape(chart.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(chart.png).decode()}">\n'
        for chart in drawn
    )
    return tables + "".join(images) + "</html>\n"
