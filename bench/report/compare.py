"""Two reports beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from radixcache.bench.replay.figures import Figures
from radixcache.bench.replay.replicas import RoutingFigures
from radixcache.bench.report.results import Report
from radixcache.bench.report.saved import read_json
from radixcache.bench.tables import console, plain, table
from radixcache.errors import InvalidRequest

Key = tuple[str, str, str, str]
"""Workload, level, memory and scheme of a row; with several replicas, the way to route as well."""

Row = Figures | RoutingFigures


def print_comparison(paths: Sequence[str]) -> int:
    """Show what differs between two files of `--json`: the settings first, then every figure of
    the rows that both have, then what only one has.

    Raises:
        InvalidRequest: there are not two, or one is no report.
    """
    if len(paths) != 2:
        raise InvalidRequest(f"compare takes two reports, A.json and B.json, not {len(paths)}")
    first, second = (read_json(Path(path)) for path in paths)
    compare(first, second, console())
    return 0


def compare(first: Report, second: Report, shown: Console) -> None:
    """Show what differs between two reports, a -> b."""
    settings = _changed_settings(first, second)
    if settings.row_count:
        shown.print("Not measured alike, so differences may come from that:", markup=False)
        shown.print(settings)
    a, b = _rows(first), _rows(second)
    both = [key for key in a if key in b]
    for (workload, level), keys in groupby(both, key=lambda key: key[:2]):
        shown.rule(
            plain(f"{workload}, {level}{'' if level == 'routing' else ' level'}"), align="left"
        )
        shown.print(_table([(*key[2:], a[key], b[key]) for key in keys]))
    if not both:
        shown.print("The two have no workload, memory and scheme in common.", markup=False)
    for name, rows, others in (("first", a, b), ("second", b, a)):
        if missing := [key for key in rows if key not in others]:
            shown.print(f"Only in the {name}:", markup=False)
            for place, keys in groupby(missing, key=lambda key: key[:3]):
                schemes = ", ".join(key[3] for key in keys)
                shown.print(plain(f"  {', '.join(place)}: {schemes}"))


def _rows(report: Report) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for workload in report.workloads:
        for row in sorted(workload.rows, key=lambda row: row.level):
            found[workload.name, row.level, row.memory, row.scheme] = row
        for routed in workload.routing:
            way = f"{routed.scheme} {routed.routing}"
            found[workload.name, "routing", routed.memory, way] = routed
    return found


def _changed_settings(first: Report, second: Report) -> Table:
    names = dict.fromkeys([*first.settings, *second.settings])
    names.pop("command", None)  # says the same again
    told = [[str(side.settings.get(name, "–")) for side in (first, second)] for name in names]
    changed = [[name, *both] for name, both in zip(names, told, strict=True) if both[0] != both[1]]
    shown = table(["setting", "a", "b"], changed, left=3)
    for column in shown.columns[1:]:
        column.no_wrap, column.overflow = False, "fold"
    return shown


def _table(pairs: list[tuple[str, str, Row, Row]]) -> Table:
    """a -> b; of the index level the cache's time, of a clock the median TTFT, or the mean."""
    header = ["memory", "scheme", "hit %", "prefilled", "change", _last(pairs[0][2])[0]]
    rows = [
        [
            memory,
            scheme,
            _arrow(100 * a.hit_rate, 100 * b.hit_rate, 1),
            _arrow(a.computed_tokens, b.computed_tokens, 0),
            _change(a.computed_tokens, b.computed_tokens),
            _arrow(_last(a)[1], _last(b)[1], _last(a)[2]),
        ]
        for memory, scheme, a, b in pairs
    ]
    shown = table(header, rows, left=2)
    for column in shown.columns[2:]:  # where there is no room, a figure breaks at its arrow
        column.no_wrap = False
    return shown


def _last(row: Row) -> tuple[str, float | None, int]:
    """Title, figure and digits of the last column."""
    if isinstance(row, RoutingFigures):
        return "TTFT, ms", 1000 * row.ttft_mean, 1
    if row.engine is not None:
        return "TTFT p50, ms", 1000 * row.engine.ttft_p50.median, 1
    return "cache, µs", row.cache_us, 0


def _arrow(a: float | None, b: float | None, digits: int) -> str:
    """Both figures, or the one that they share."""
    said = ["–" if x is None else f"{x:,.{digits}f}" for x in (a, b)]
    return " → ".join(dict.fromkeys(said))


def _change(a: float, b: float) -> str:
    if a == b:
        return "="
    return f"{b / a - 1:+.1%}" if a else "new"
