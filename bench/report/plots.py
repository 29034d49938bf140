"""The plots of a report, as Vega-Lite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from radixcache.bench.replay.figures import Figures
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
    "background": None,
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
        spec: Vega-Lite. The signal `shown` lists what of `styles` is drawn, `memory` names the
            amount of memory where a plot is of one.
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
    """What is drawn before anybody has asked for more."""
    names = list(styles(workload))
    schemes = dict.fromkeys(row.scheme for row in workload.rows)
    if len(schemes) > 5 and any(scheme in _FEW for scheme in schemes):
        return [name for name in names if name in _FEW]
    return names


def plots(workload: WorkloadReport) -> Iterator[Plot]:
    """Of one workload: its hit rates, and what each turn prefills."""
    rows = workload.main_rows
    yield _hit_rates(workload, rows)
    if any(len(row.computed_by_turn) > 1 for row in rows):
        yield _by_turn(workload, rows)


def _hit_rates(workload: WorkloadReport, rows: list[Figures]) -> Plot:
    total = workload.prompt_tokens
    points = [
        {
            "scheme": row.scheme,
            "memory": row.memory_tokens,
            "asked": row.memory,
            "share": row.hit_rate,
            "spoiled": row.spoiled or "no",
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
    tips = [_tip("scheme"), _tip("asked", "memory"), _tip("memory", "tokens", ","), _tip("spoiled")]
    tips[2:2] = [_tip("share", "hit", ".1%")]
    bound = [_tip("scheme", "bound"), _tip("share", "hit", ".1%")]
    looks = _looks(workload)
    colour, shape = looks["color"], looks["shape"]
    line = {"x": x, "y": y, "color": colour, "strokeDash": looks["strokeDash"]}
    dots = {"x": x, "y": y, "color": colour, "tooltip": tips}
    marred = f"{_SHOWN} && datum.spoiled !== 'no'"
    layers = [
        _layer("limit", _LINE | {"type": "rule"}, {"y": y, "color": colour, "tooltip": bound}),
        _layer("best", _LINE, line),
        _layer("best", _POINT | {"opacity": 0}, dots | {"tooltip": [*bound, tips[3]]}),
        _layer("points", _LINE, line),
        _layer("points", _POINT, dots | {"shape": shape}),
        _layer("points", {"type": "point", "size": 180}, dots, marred),
    ]
    note = "Every point is a replay."
    if any(row.refused or row.preemptions for row in rows):
        note += " A ring: requests were refused or preempted, which spoils the figure."
    data = {"points": points, "best": best, "limit": limit}
    return Plot("Hit rate over memory", note, _spec(workload, layers, **data))


def _by_turn(workload: WorkloadReport, rows: list[Figures]) -> Plot:
    points = [
        {"scheme": row.scheme, "memory": row.memory, "turn": turn, "tokens": tokens}
        for row in rows
        for turn, tokens in enumerate(row.computed_by_turn, 1)
    ]
    turns = max(len(row.computed_by_turn) for row in rows)
    step = max(1, math.ceil(turns / 12))
    x = _axis("turn", "turn of the conversation", "d")
    x["axis"]["values"] = list(range(1, turns + 1, step))
    x["scale"] = {"domain": [1, turns], "nice": False, "padding": 8}
    looks = _looks(workload)
    dots = {"x": x, "y": _axis("tokens", "tokens prefilled a request", "~s")}
    dots["color"] = looks["color"]
    tips = [_tip("scheme"), _tip("turn"), _tip("tokens", "prefilled a request", ",.1f")]
    layers = [
        _layer("points", _LINE, dots | {"strokeDash": looks["strokeDash"]}, _HERE),
        _layer("points", _POINT, dots | {"shape": looks["shape"], "tooltip": tips}, _HERE),
    ]
    note = "Prompt tokens computed for a request, mean over the conversations: lower is better."
    return Plot("Prefilled tokens by turn", note, _spec(workload, layers, points=points))


_SHOWN = "indexof(shown, datum.scheme) >= 0"
_HERE = f"{_SHOWN} && datum.memory === memory"
_LINE = {"type": "line", "strokeWidth": 2}
_POINT = {"type": "point", "filled": True, "size": 55, "opacity": 1}


def _layer(data: str, mark: Spec, encoding: Spec, only: str = _SHOWN) -> Spec:
    """One layer, of the data of this name for which the expression `only` holds."""
    shown = [{"filter": only}]
    return {"data": {"name": data}, "mark": mark, "encoding": encoding, "transform": shown}


def _axis(name: str, title: str, pattern: str) -> Spec:
    axis = {"title": title, "labelExpr": f"format(datum.value, '{pattern}')", "tickCount": 5}
    return {"field": name, "type": "quantitative", "axis": axis}


def _tip(name: str, title: str | None = None, pattern: str = "") -> Spec:
    kind = {"type": "quantitative", "format": pattern} if pattern else {"type": "nominal"}
    return {"field": name, "title": title or name, **kind}


def _looks(workload: WorkloadReport) -> dict[str, Spec]:
    drawn = styles(workload)
    field = {"field": "scheme", "type": "nominal", "legend": None}
    return {
        name: {**field, "scale": {"domain": list(drawn), "range": values}}
        for name, values in (
            ("color", [style.colour for style in drawn.values()]),
            ("strokeDash", [style.dash or [1, 0] for style in drawn.values()]),
            ("shape", [style.shape or "circle" for style in drawn.values()]),
        )
    }


def _spec(workload: WorkloadReport, layers: list[Spec], **data: list[dict[str, Any]]) -> Spec:
    """A whole plot of this data; one of a single amount of memory shows the largest at first."""
    most = max(workload.rows, key=lambda row: row.memory_tokens)
    params = [{"name": "shown", "value": few(workload)}, {"name": "memory", "value": most.memory}]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": 240,
        "config": _CONFIG,
        "datasets": data,
        "params": params,
        "layer": layers,
    }


def still(plot: Plot, width: int = 640) -> str:
    """The plot as SVG, with its legend below, for where no script runs."""
    import vl_convert

    spec = json.loads(json.dumps(plot.spec))
    shown = spec["params"][0]["value"]
    for layer in spec["layer"]:
        if "field" in layer["encoding"].get("color", {}):
            for name in layer["encoding"].keys() & {"color", "strokeDash", "shape"}:
                layer["encoding"][name]["legend"] = {"values": shown}
    spec["config"]["background"] = "white"
    return vl_convert.vegalite_to_svg(spec | {"width": width})
