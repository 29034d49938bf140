"""The report of a benchmark: tables for the terminal, JSON, and one page with figures."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixcache.bench.replay.figures import Figures, Overhead
from radixcache.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

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
        overheads: what a cache costs where nothing is hit, at engine level.
    """

    settings: dict[str, Any]
    workloads: list[WorkloadReport] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)

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
                "overheads": [
                    {"mode": o.mode, "ratios": o.ratios, "share_lost": o.share.median}
                    for o in self.overheads
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


# Tables: a header and rows of text, shown by rich, Markdown or HTML alike.

Table = tuple[list[str], list[list[str]]]


def index_table(workload: WorkloadReport) -> Table:
    """Hits, work and memory at index level."""
    header = ["memory", "mode", "hit", "of unlimited", "of optimal", "prefilled", "doubled"]
    header += ["evicted", "peak pages", "empty slots", "cache µs", "refused"]
    rows = []
    for row in workload.level("index"):
        optimal = workload.optimal_hits.get(row.memory_tokens, 0)
        rows.append(
            [
                row.memory,
                row.mode,
                f"{row.hit_rate:.1%}",
                _share(row.hit_tokens, workload.unlimited_hits),
                _share(row.hit_tokens, optimal),
                f"{row.computed_tokens:,}",
                f"{row.doubled_tokens or 0:,}",
                f"{row.evicted_tokens:,}",
                f"{row.peak_used_pages or 0:,}",
                f"{row.empty_share or 0:.1%}",
                f"{row.cache_us or 0:,.0f}",
                f"{row.refused:,}",
            ]
        )
    return header, rows


def engine_table(workload: WorkloadReport) -> Table:
    """Times at engine level: medians over the repeats, and the range of the throughput."""
    header = ["memory", "mode", "hit", "prefilled", "TTFT p50", "p90", "p99", "tokens/s", "range"]
    rows = []
    for row in workload.level("engine"):
        timed = row.engine
        if timed is not None:
            spread = timed.throughput
            rows.append(
                [
                    row.memory,
                    row.mode,
                    f"{row.hit_rate:.1%}",
                    f"{row.computed_tokens:,}",
                    *(
                        f"{1000 * p.median:,.1f} ms"
                        for p in (timed.ttft_p50, timed.ttft_p90, timed.ttft_p99)
                    ),
                    f"{spread.median:,.0f}",
                    f"{spread.low:,.0f}–{spread.high:,.0f}",
                ]
            )
    return header, rows


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
        yield workload.name, [*notes, *verdicts(workload)], [t for t in tables if t[1]]
    if report.overheads:
        header = ["mode", "throughput lost", "range", "pairs"]
        rows = [
            [
                overhead.mode,
                f"{overhead.share.median:+.2%}",
                f"{overhead.share.low:+.2%} to {overhead.share.high:+.2%}",
                str(len(overhead.ratios)),
            ]
            for overhead in report.overheads
        ]
        yield "Nothing to hit", ["Runs with the cache and without, in pairs."], [(header, rows)]


def print_report(report: Report, console: Console) -> None:
    """Show the tables on a terminal."""
    from rich.table import Table as RichTable

    for title, notes, tables in sections(report):
        console.rule(title, align="left")
        console.print(*notes, sep="\n", highlight=False, markup=False)
        for header, rows in tables:
            shown = RichTable(box=None, pad_edge=False, header_style="bold")
            for name in header:
                left = name in ("memory", "mode")
                shown.add_column(name, justify="left" if left else "right", no_wrap=True)
            for row in rows:
                shown.add_row(*row)
            console.print(shown, highlight=False)
    for line in _settings_lines(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _settings_lines(report: Report) -> list[str]:
    return [", ".join(f"{key} {value}" for key, value in report.settings.items())]


def write_report(report: Report, path: Path) -> None:
    """Write one self-contained page: .html with the figures inside, .md with PNG files beside it.

    Raises:
        InvalidRequest: another ending, or a place that cannot be written.
        MissingDependency: matplotlib is not installed.
    """
    if path.suffix not in (".html", ".md"):
        raise InvalidRequest(f"a report ends in .html or .md, not {path.name!r}")
    figures = [(title, _draw(draw)) for title, draw in _figures(report)]
    try:
        if path.suffix == ".html":
            path.write_text(_html(report, figures), encoding="utf-8")
        else:
            path.write_text(_markdown(report, figures, path.stem), encoding="utf-8")
            for number, (_, png) in enumerate(figures, 1):
                path.with_name(f"{path.stem}-{number}.png").write_bytes(png)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None


def _markdown(report: Report, figures: Sequence[tuple[str, bytes]], stem: str) -> str:
    parts = ["# Prefix caching: radix against hash-block", *_settings_lines(report)]
    for title, notes, tables in sections(report):
        parts += [f"## {title}", *notes]
        for header, rows in tables:
            lines = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    for number, (title, _) in enumerate(figures, 1):
        parts.append(f"![{title}]({stem}-{number}.png)")
    return "\n\n".join(parts) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
img { max-width: 100% } figure { margin: 2em 0 }
"""


def _html(report: Report, figures: Sequence[tuple[str, bytes]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    title = "Prefix caching: radix against hash-block"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in _settings_lines(report)),
    ]
    for name, notes, tables in sections(report):
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts += [f"<p>{html.escape(note)}</p>" for note in notes]
        for header, rows in tables:
            body = "".join(row(cells, "td") for cells in rows)
            parts.append(f"<table>{row(header, 'th')}{body}</table>")
    for name, png in figures:
        data = base64.b64encode(png).decode()
        caption = html.escape(name)
        parts.append(f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"></figure>')
    return "\n".join(parts) + "</html>\n"


# Figures.

Draw = Callable[["Axes"], None]


def _figures(report: Report) -> Iterator[tuple[str, Draw]]:
    for workload in report.workloads:
        rows = workload.level("index") or workload.level("engine")
        if rows:
            yield f"{workload.name}: hit rate over memory", _hit_rates(workload, rows)
        if any(len(row.computed_by_turn) > 1 for row in rows):
            yield f"{workload.name}: prefill tokens by turn", _by_turn(workload, rows)
        timed = workload.level("engine")
        if timed:
            yield f"{workload.name}: time to first token", _ttfts(workload, timed)


def _hit_rates(workload: WorkloadReport, rows: list[Figures]) -> Draw:
    def draw(axes: Axes) -> None:
        for name, points in workload.curves.items():
            axes.plot(*zip(*points, strict=True), ":", linewidth=1, label=f"{name}, LRU, one pass")
        for mode in dict.fromkeys(row.mode for row in rows):
            at = sorted((row.memory_tokens, row.hit_rate) for row in rows if row.mode == mode)
            axes.plot(*zip(*at, strict=True), "o-", markersize=4, label=mode)
        if workload.optimal_hits:
            best = sorted((m, h / workload.prompt_tokens) for m, h in workload.optimal_hits.items())
            axes.plot(*zip(*best, strict=True), "k--", label="offline optimum")
        axes.axhline(
            workload.unlimited_hits / workload.prompt_tokens, color="grey", label="unlimited memory"
        )
        axes.set_xlabel("KV memory, tokens")
        axes.set_ylabel("share of prompt tokens hit")
        axes.set_ylim(0, 1)

    return draw


def _by_turn(workload: WorkloadReport, rows: list[Figures]) -> Draw:
    def draw(axes: Axes) -> None:
        most = max(row.memory_tokens for row in rows)
        for row in rows:
            if row.memory_tokens == most:
                turns = range(1, len(row.computed_by_turn) + 1)
                axes.plot(turns, row.computed_by_turn, "o-", markersize=4, label=row.mode)
        axes.set_xlabel("turn")
        axes.set_ylabel(f"prefilled tokens per request, {most:,} tokens of memory")
        axes.set_ylim(bottom=0)

    return draw


def _ttfts(workload: WorkloadReport, rows: list[Figures]) -> Draw:
    def draw(axes: Axes) -> None:
        most = max(row.memory_tokens for row in rows)
        for row in rows:
            if row.memory_tokens == most and row.engine is not None:
                times = sorted(1000 * time for time in row.engine.ttfts)
                shares = [(n + 1) / len(times) for n in range(len(times))]
                axes.plot(times, shares, label=row.mode)
        axes.set_xlabel(f"time to first token, ms, {most:,} tokens of memory")
        axes.set_ylabel("share of requests")
        axes.set_xscale("log")

    return draw


def _draw(draw: tuple[str, Draw] | Draw) -> bytes:
    """A figure as PNG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "a report with figures needs matplotlib: pip install 'radixcache[bench]'"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    assert callable(draw)
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
