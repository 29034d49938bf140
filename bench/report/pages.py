"""A report as one page of HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.columns import Column, tables
from radixcache.bench.report.plots import few, plots, styles
from radixcache.bench.report.results import Report, WorkloadReport
from radixcache.bench.report.verdicts import headline, remarks

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'"


def as_html(report: Report) -> str:
    """The page. It loads nothing, and its policy lets it load nothing."""
    hybrid = any(workload.states for workload in report.workloads)
    title = f"Prefix caching: {'recurrent states' if hybrid else 'radix against hash-block'}"
    specs: list[object] = []
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


def _section(workload: WorkloadReport, specs: list[object]) -> Iterator[str]:
    """One workload; its plots go to the end of `specs`."""
    yield f'<h2>{escape(workload.name)}</h2><p class="headline">{_headline(workload)}</p>'
    yield f'<p class="note">{escape(workload.summary)}</p>'
    yield from _legend(workload)
    yield '<div class="plots">'
    for plot in plots(workload):
        yield f"<figure><figcaption><h3>{escape(plot.title)}</h3></figcaption>"
        yield f'<div class="plot" data-plot="{len(specs)}"></div>'
        yield f'<p class="note">{escape(plot.note)}</p></figure>'
        specs.append(plot.spec)
    yield "</div>"
    for columns, rows in tables(workload):
        yield from _table(columns, workload, rows)
    if said := remarks(workload):
        lines = "".join(f"<li>{escape(line)}</li>" for line in said)
        yield f"<details><summary>Remarks</summary><ul>{lines}</ul></details>"


def _headline(workload: WorkloadReport) -> str:
    return re.sub(r"(\d+%) fewer", r"<b>\1 fewer</b>", escape(headline(workload)))


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
        yield f'<tr{css} data-scheme="{escape(row.scheme)}">'
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
