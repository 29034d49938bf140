"""docs/gallery.md: what the schemes hit on public workloads, each in a plot and a sentence."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import vl_convert

from radixcache.bench import cli
from radixcache.bench.args import BenchArgs
from radixcache.bench.report.plots import plots, still, styles
from radixcache.bench.report.results import WorkloadReport
from radixcache.bench.report.verdicts import headline, remarks
from radixcache.bench.workloads.public_data import PUBLIC, data_folder

OPTIONS = "--schemes hash-16 radix-1 radix-16 --memory 10% 30% 60% 100%"
SHORT = ("hash-16", "radix-16")
"""What the picture of all six shows."""

BEGINNING = """\
# Gallery

Hit rates of six public workloads over the memory for KV, which is given as a share of the
workload's distinct tokens. `hash-16` is vLLM's scheme with blocks of 16 tokens, `radix-1` and
`radix-16` are ours with pages of 1 and of 16; the sentences take the better of the two. No
model runs: every figure is a count. `python -m docs.pictures gallery` measures and draws this page
anew; it needs the data, in `../shared/data` or in the folder `RADIXCACHE_DATA`. The workloads are
described in [public_data.py](../bench/workloads/public_data.py), what the figures mean in
[benchmarks.md](benchmarks.md).
"""
CHAPTER = """
## {name}

![Hit rate over memory on {name}](pictures/gallery-{name}.svg)

{shape}: {requests:,} requests, {prompt_tokens:,} prompt tokens. {headline}
{remarks}
```
{command}
```
"""


def take(folder: Path) -> None:
    """Measure and draw all of it."""
    if data_folder() is None:
        print("no gallery: the public data are not in ../shared/data, nor is RADIXCACHE_DATA set")
        return
    text, found = BEGINNING, []
    for name in PUBLIC:
        command = f"radixcache bench {name} {OPTIONS}"
        workload = measure(command)
        found.append(workload)
        (folder / f"gallery-{name}.svg").write_text(still(next(plots(workload))))
        said = {"headline": headline(workload), "command": command}
        lines = [f"\n- {line}" for line in remarks(workload)]
        said["remarks"] = "".join(lines) + "\n" * bool(lines)
        text += CHAPTER.format(**vars(workload), **said)
    (folder / "gallery.svg").write_text(vl_convert.vegalite_to_svg(all_of(found)))
    (folder.parent / "gallery.md").write_text(text)


def measure(command: str) -> WorkloadReport:
    """What this command line finds about its one workload."""
    parser = argparse.ArgumentParser()
    cli.add_flags(parser)
    args = BenchArgs.of(parser.parse_args(shlex.split(command)[2:]))
    (workload,) = cli.measure(args).workloads
    return workload


def all_of(workloads: list[WorkloadReport]) -> dict[str, Any]:
    """Small plots side by side, as Vega-Lite."""
    values = [
        {"workload": workload.name, "scheme": row.scheme, "memory": row.memory, "hit": row.hit_rate}
        for workload in workloads
        for row in workload.rows
        if row.scheme in SHORT
    ]
    drawn = styles(workloads[0])
    colours = {"domain": SHORT, "range": [drawn[name].colour for name in SHORT]}
    panel = {"field": "workload", "title": None, "sort": [w.name for w in workloads]}
    axis = {"title": "KV memory, of the distinct tokens", "labelAngle": 0}
    encoding = {
        "facet": {**panel, "columns": 3, "header": {"labelFontSize": 13}},
        "x": {"field": "memory", "type": "ordinal", "sort": None, "axis": axis},
        "y": {"field": "hit", "type": "quantitative", "title": "hit", "axis": {"format": "%"}},
        "color": {"field": "scheme", "scale": colours, "legend": {"orient": "top", "title": None}},
    }
    mark = {"type": "line", "point": True}
    data = {"values": values}
    size = {"width": 210, "height": 120, "config": {"axis": {"titleFontWeight": 400}}}
    return {"data": data, "mark": mark, "encoding": encoding, **size}
