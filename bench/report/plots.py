"""The plots of a report, as Vega-Lite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from radixcache.bench.report.results import WorkloadReport

Spec = dict[str, Any]

OPTIMUM, UNLIMITED = "offline optimum", "unlimited memory"
_FEW = ("hash-16", "radix-1", "radix-16", OPTIMUM, UNLIMITED)
_GREY = "#8a8a8a"
_COLOURS = {  # of Okabe and Ito: told apart by the colour-blind too
    "none": _GREY,
    OPTIMUM: "currentColor",
    UNLIMITED: _GREY,
    "hash-16": "#0072b2",
    "hash": "#56b4e9",
    "radix-1": "#d55e00",
    "radix": "#e69f00",
    "aligned": "#009e73",
    "kv-alone": _GREY,
    "ours": "#d55e00",
    "ours-untold": "#e69f00",
    "marconi": "#56b4e9",
    "sglang": "#cc79a7",
    "sglang-64": "#009e73",
    "vllm": "#0072b2",
}
_OTHERS = "#cc79a7"
_DASHES: tuple[list[int], ...] = ([], [6, 2], [2, 2], [8, 2, 2, 2], [5, 3], [12, 3])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_CONFIG = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridOpacity": 0.12, "domainOpacity": 0.4, "tickOpacity": 0.4, "titleFontWeight": 400}
    | {f"{part}Color": "currentColor" for part in ("label", "title", "grid", "domain", "tick")}
    | {"labelFontSize": 11, "titleFontSize": 12},
    "legend": {"orient": "bottom", "title": None, "columns": 4, "labelColor": "currentColor"},
}


class Style(NamedTuple):
    """How a scheme or a bound is drawn, in every plot of a report."""

    colour: str
    dash: list[int]
    shape: str


class Plot(NamedTuple):
    """One plot.

    Attributes:
        note: what it shows, in a sentence.
        spec: Vega-Lite, of what `few` names.
    """

    title: str
    note: str
    spec: Spec


def styles(workload: WorkloadReport) -> dict[str, Style]:
    """Every scheme of a workload, then the bounds. A scheme looks the same in all workloads."""
    found = {}
    for name in dict.fromkeys(row.scheme for row in workload.rows):
        kind, _, size = name.partition("-")
        colour = _COLOURS.get(name) or _COLOURS.get(kind, _OTHERS)
        sizes = int(math.log2(int(size))) if size.isdecimal() and int(size) else len(name)
        nth = 0 if name in _COLOURS else sizes % len(_DASHES)
        found[name] = Style(colour, _DASHES[nth], _SHAPES[nth])
    if workload.optimal_hits:
        found[OPTIMUM] = Style("currentColor", [6, 3], "")
    found[UNLIMITED] = Style(_GREY, [], "")
    return found


def few(workload: WorkloadReport) -> list[str]:
    """Names of the schemes to draw: some, if there are many."""
    names = list(styles(workload))
    schemes = dict.fromkeys(row.scheme for row in workload.rows)
    if len(schemes) > 5 and any(scheme in _FEW for scheme in schemes):
        return [name for name in names if name in _FEW]
    return names


def plots(workload: WorkloadReport) -> Iterator[Plot]:
    """Plot a workload's hit rates, and what each turn prefills in the most memory."""
    yield _hit_rates(workload)
    if any(len(row.computed_by_turn) > 1 for row in workload.main_rows):
        yield _by_turn(workload)


def still(plot: Plot, background: str | None = "white") -> str:
    """The plot as SVG."""
    import vl_convert

    config = plot.spec["config"] | {"background": background}
    return vl_convert.vegalite_to_svg(plot.spec | {"width": 640, "config": config})


def _hit_rates(workload: WorkloadReport) -> Plot:
    total, names = workload.prompt_tokens, few(workload)
    rows = [row for row in workload.main_rows if row.scheme in names]
    points = [
        {
            "scheme": row.scheme,
            "memory": row.memory_tokens,
            "share": row.hit_rate,
            "spoiled": bool(row.spoiled),
        }
        for row in rows
    ]
    best = [
        {"scheme": OPTIMUM, "memory": memory, "share": hits / total}
        for memory, hits in sorted(workload.optimal_hits.items())
    ]
    limit = [{"scheme": UNLIMITED, "share": workload.unlimited_hits / total}]
    x = {**_axis("memory", "KV memory, tokens", "~s"), "scale": {"zero": False}}
    y = {**_axis("share", "share of prompt tokens hit", ".0%"), "scale": {"domainMin": 0}}
    looks = _looks(workload, names)
    line = {"x": x, "y": y, "color": looks["color"], "strokeDash": looks["strokeDash"]}
    dots = {"x": x, "y": y, "color": looks["color"], "shape": looks["shape"]}
    layers = [
        _layer("limit", _LINE | {"type": "rule"}, {"y": y, "color": looks["color"]}),
        _layer("best", _LINE, line),
        _layer("points", _LINE, line),
        _layer("points", _POINT, dots),
        _layer("spoiled", {"type": "point", "size": 180}, line | {"strokeDash": {"value": []}}),
    ]
    spoiled = [point for point in points if point["spoiled"]]
    note = "Every point is a replay."
    if spoiled:
        note += " A ring: requests were refused or preempted, which spoils the figure."
    data = {"points": points, "best": best, "limit": limit, "spoiled": spoiled}
    return Plot("Hit rate over memory", note, _spec(layers, **data))


def _by_turn(workload: WorkloadReport) -> Plot:
    most = max(row.memory_tokens for row in workload.main_rows)
    rows = [row for row in workload.main_rows if row.memory_tokens == most]
    rows = [row for row in rows if row.scheme in few(workload)]
    points = [
        {"scheme": row.scheme, "turn": turn, "tokens": tokens}
        for row in rows
        for turn, tokens in enumerate(row.computed_by_turn, 1)
    ]
    turns = max(len(row.computed_by_turn) for row in rows)
    step = max(1, math.ceil(turns / 12))
    x = _axis("turn", "turn of the conversation", "d")
    x["axis"]["values"] = list(range(1, turns + 1, step))
    x["scale"] = {"domain": [1, turns], "nice": False, "padding": 8}
    looks = _looks(workload, [row.scheme for row in rows])
    dots = {"x": x, "y": _axis("tokens", "tokens prefilled a request", "~s")}
    dots["color"] = looks["color"]
    layers = [
        _layer("points", _LINE, dots | {"strokeDash": looks["strokeDash"]}),
        _layer("points", _POINT, dots | {"shape": looks["shape"]}),
    ]
    note = f"Prompt tokens computed for a request in memory for {rows[0].memory}, mean over the "
    note += "conversations: lower is better."
    return Plot("Prefilled tokens by turn", note, _spec(layers, points=points))


_LINE = {"type": "line", "strokeWidth": 2}
_POINT = {"type": "point", "filled": True, "size": 55, "opacity": 1}


def _layer(data: str, mark: Spec, encoding: Spec) -> Spec:
    """One layer, of the data of this name."""
    return {"data": {"name": data}, "mark": mark, "encoding": encoding}


def _axis(name: str, title: str, pattern: str) -> Spec:
    axis = {"title": title, "labelExpr": f"format(datum.value, '{pattern}')", "tickCount": 5}
    return {"field": name, "type": "quantitative", "axis": axis}


def _looks(workload: WorkloadReport, names: list[str]) -> dict[str, Spec]:
    drawn = [styles(workload)[name] for name in names]
    field = {"field": "scheme", "type": "nominal"}
    return {
        name: {**field, "scale": {"domain": names, "range": values}}
        for name, values in (
            ("color", [style.colour for style in drawn]),
            ("strokeDash", [style.dash or [1, 0] for style in drawn]),
            ("shape", [style.shape or "circle" for style in drawn]),
        )
    }


def _spec(layers: list[Spec], **data: list[dict[str, Any]]) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "height": 240,
        "config": _CONFIG,
        "datasets": data,
        "layer": layers,
    }
