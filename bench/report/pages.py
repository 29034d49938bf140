"""A report as one page of HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from radixcache.bench.report.columns import ENGINE, INDEX, ROUTING, Column
from radixcache.bench.report.files import write
from radixcache.bench.report.headline import headline
from radixcache.bench.report.plots import few, plots, spoiled, styles
from radixcache.bench.report.results import Report, WorkloadReport, verdicts
from radixcache.bench.report.terminal import remarks

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'"


def write_report(report: Report, path: Path) -> None:
    """Write one page with all it needs inside; `InvalidRequest` if it cannot be written."""
    write(path, as_html(report))


def as_html(report: Report) -> str:
    """The page. It loads nothing, and its policy lets it load nothing."""
    title, specs = _title(report), list[object]()
    body = [f"<header><h1>{title}</h1><ol>"]
    for number, workload in enumerate(report.workloads):
        name = f'<a href="#w{number}">{escape(workload.name)}</a>'
        body.append(f"<li>{name} {_headline(workload)}</li>")
    body.append("</ol></header><main>")
    for number, workload in enumerate(report.workloads):
        body += [f'<section id="w{number}">', *_section(workload, specs), "</section>"]
    body += ["</main><footer>", *_settings(report), "</footer>"]
    data = json.dumps(specs, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{title}</title><style>{(_HERE / 'page.css').read_text()}</style>"
    scripts = [
        f'<script type="application/json" id="plots">{data}</script>',
        f"<script>{_library()}</script>",
        f"<script>{(_HERE / 'page.js').read_text()}</script>",
    ]
    page = [f'<!doctype html><html lang="en"><head>{head}</head><body>', *body, *scripts]
    return "\n".join([*page, "</body></html>\n"])


@cache
def _library() -> str:
    """The JavaScript that draws, 0.9 MB; it takes a second or two."""
    import vl_convert

    library: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
    return library


def _title(report: Report) -> str:
    routed = any(workload.routing for workload in report.workloads)
    return f"Prefix caching: {'ways to route' if routed else 'radix against hash-block'}"


def _section(workload: WorkloadReport, specs: list[object]) -> Iterator[str]:
    """One workload; its plots go to the end of `specs`."""
    yield f'<h2>{escape(workload.name)}</h2><p class="headline">{_headline(workload)}</p>'
    yield f'<p class="note">{escape(summary(workload))}</p>'
    if workload.rows:
        yield from _legend(workload)
    yield '<div class="plots">'
    for plot in plots(workload):
        yield f"<figure><figcaption><h3>{escape(plot.title)}</h3></figcaption>"
        yield f'<div class="plot" data-plot="{len(specs)}"></div>'
        yield f'<p class="note">{escape(plot.note)}</p></figure>'
        specs.append(plot.spec)
    yield "</div>"
    for level, columns, rows in _tables(workload):
        yield from _table(level, columns, workload, rows)
    for title, said in (("Remarks", remarks(workload)), ("Verdicts", verdicts(workload))):
        if said:
            lines = "".join(f"<li>{escape(line)}</li>" for line in said)
            yield f"<details><summary>{title}</summary><ul>{lines}</ul></details>"


def _headline(workload: WorkloadReport) -> str:
    """Its figures in bold."""
    return re.sub(r"(\d+(?: to \d+)? %) fewer", r"<b>\1 fewer</b>", escape(headline(workload)))


def summary(workload: WorkloadReport) -> str:
    """What the workload is, in one paragraph."""
    said = f"{workload.shape}: {workload.requests:,} requests, {workload.prompt_tokens:,} prompt "
    said += f"and {workload.answer_tokens:,} generated tokens, {workload.footprint:,} of them "
    said += "distinct."
    if (differ := workload.disagreements) is not None:
        said += (
            f" Index and engine level DIFFER in the hits of {differ:,} requests."
            if differ
            else " Index and engine level hit the same tokens, request by request."
        )
    return said


def _legend(workload: WorkloadReport) -> Iterator[str]:
    memories = list(dict.fromkeys(row.memory for row in workload.rows))
    shown = few(workload)
    yield '<form class="legend" autocomplete="off">'
    for name, style in styles(workload).items():
        dash = ",".join(map(str, style.dash))
        line = f'<path d="M0 6h28" stroke="{style.colour}" stroke-dasharray="{dash}"/>'
        checked = " checked" if name in shown else ""
        yield f'<label><input type="checkbox" value="{escape(name)}"{checked}>'
        yield f'<svg viewBox="0 0 28 12" aria-hidden="true">{line}</svg>{escape(name)}</label>'
    if len(memories) > 1:
        most = max(workload.rows, key=lambda row: row.memory_tokens).memory
        options = (
            f"<option{' selected' if name == most else ''}>{escape(name)}</option>"
            for name in memories
        )
        yield f"<label>memory of the other plots <select>{''.join(options)}</select></label>"
    yield '<button type="button">all schemes</button></form>'


def _tables(workload: WorkloadReport) -> Iterator[tuple[str, list[Column], list[Any]]]:
    for level, columns in (("index", INDEX), ("engine", ENGINE)):
        if rows := workload.level(level):
            yield level, columns, rows
    if workload.routing:
        yield "routing", ROUTING, workload.routing


def _table(
    level: str, columns: list[Column], workload: WorkloadReport, rows: list[Any]
) -> Iterator[str]:
    yield f'<div class="table"><table data-level="{level}"><thead><tr>'
    for column in columns:
        title = f'<abbr title="{escape(column.note)}">{escape(column.title)}</abbr>'
        yield f'<th scope="col">{title}<small>{escape(column.unit)}</small></th>'
    yield "</tr></thead><tbody>"
    for above, row in zip([None, *rows], rows, strict=False):
        first = above is None or above.memory != row.memory
        css = ' class="first"' if first else ""
        listed = "" if level == "routing" else f' data-scheme="{escape(row.scheme)}"'
        yield f"<tr{css}{listed}>"
        for column in columns:
            text = escape(column.text(workload, row))
            if column.title == "hit":
                said = "" if level == "routing" else spoiled(row)
                mark = f"<em>{escape(said)}</em> " if said else ""
                yield f'<td style="--share:{row.hit_rate:.4f}">{mark}{text}</td>'
            else:
                yield f"<td>{text}</td>"
        yield "</tr>"
    yield "</tbody></table></div><details><summary>What the columns say</summary><dl>"
    yield from (f"<dt>{escape(c.title)}</dt><dd>{escape(c.note)}</dd>" for c in columns)
    yield "</dl></details>"


def _settings(report: Report) -> Iterator[str]:
    yield "<h2>How it was measured</h2>"
    settings = dict(report.settings)
    if command := settings.pop("command", None):
        yield f"<p>To run it again:</p><pre>{escape(str(command))}</pre>"
    yield "<dl>"
    for key, value in settings.items():
        yield f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>"
    yield "</dl>"
