"""A report as one page of HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.columns import Column, tables
from radixcache.bench.report.plots import plots, still
from radixcache.bench.report.results import Report, WorkloadReport
from radixcache.bench.report.verdicts import headline, remarks

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_html(report: Report) -> str:
    """The page. It loads and runs nothing, and its policy lets it neither."""
    hybrid = any(workload.states for workload in report.workloads)
    title = f"Prefix caching: {'recurrent states' if hybrid else 'radix against hash-block'}"
    body = [f"<header><h1>{title}</h1><ol>"]
    for number, workload in enumerate(report.workloads):
        name = f'<a href="#w{number}">{escape(workload.name)}</a>'
        body.append(f"<li>{name} {_headline(workload)}</li>")
    body.append("</ol></header><main>")
    for number, workload in enumerate(report.workloads):
        body += [f'<section id="w{number}">', *_section(workload), "</section>"]
    body += ["</main><footer>", *_settings(report), "</footer>"]
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{title}</title><style>{(_HERE / 'page.css').read_text()}</style>"
    page = [f'<!doctype html><html lang="en"><head>{head}</head><body>', *body]
    return "\n".join([*page, "</body></html>\n"])


def _section(workload: WorkloadReport) -> Iterator[str]:
    yield f'<h2>{escape(workload.name)}</h2><p class="headline">{_headline(workload)}</p>'
    yield f'<p class="note">{escape(workload.summary)}</p>'
    yield '<div class="plots">'
    for plot in plots(workload):
        yield f"<figure><figcaption><h3>{escape(plot.title)}</h3></figcaption>"
        yield f'{still(plot, background=None)}<p class="note">{escape(plot.note)}</p></figure>'
    yield "</div>"
    for columns, rows in tables(workload):
        yield from _table(columns, workload, rows)
    if remarked := remarks(workload):
        lines = "".join(f"<li>{escape(line)}</li>" for line in remarked)
        yield f"<details><summary>Remarks</summary><ul>{lines}</ul></details>"


def _headline(workload: WorkloadReport) -> str:
    return re.sub(r"(\d+%) fewer", r"<b>\1 fewer</b>", escape(headline(workload)))


def _table(
    columns: list[Column], workload: WorkloadReport, rows: Sequence[Figures]
) -> Iterator[str]:
    yield '<div class="table"><table><thead><tr>'
    for column in columns:
        title = f'<abbr title="{escape(column.note)}">{escape(column.title)}</abbr>'
        yield f'<th scope="col">{title}</th>'
    yield "</tr></thead><tbody>"
    for above, row in zip([None, *rows], rows, strict=False):
        css = "" if above is not None and above.memory == row.memory else ' class="first"'
        yield f"<tr{css}>"
        for column in columns:
            bar = f' style="--share:{row.hit_rate:.4f}"' if column.title == "hit" else ""
            yield f"<td{bar}>{escape(column.text(workload, row))}</td>"
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
