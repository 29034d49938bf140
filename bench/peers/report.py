"""Makes the table that compares libraries: medians, spreads, ours over theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.table import Table

from radixcache.bench.tables import table

Values = Mapping[str, Sequence[float]]
"""The values of each round, by a figure's name with its unit."""


def comparison(found: Mapping[str, Values], notes: Mapping[str, str] | None = None) -> Table:
    """A row for each contender: each figure's median, half its range over it, and ours over theirs.

    Args:
        found: values by contender.
        notes: a last column, by contender.
    """
    names = dict.fromkeys(name for values in found.values() for name in values)
    header = ["", *(text for name in names for text in (name, "ours is"))]
    rows = []
    for contender, values in found.items():
        cells = [contender]
        for name in names:
            mine, ours = values.get(name), found.get("ours", {}).get(name)
            cells += [_shown(mine) if mine else "", ""]
            if mine and ours and not contender.startswith("ours"):
                cells[-1] = f"{median(ours) / median(mine):.3f} x"
        rows.append([*cells, *([notes.get(contender, "")] if notes is not None else [])])
    return table([*header, *([""] if notes is not None else [])], rows)


def _shown(values: Sequence[float]) -> str:
    middle = median(values)
    shown = f"{middle:,.0f}" if middle >= 100 else f"{middle:.{1 if middle >= 10 else 2}f}"
    spread = (max(values) - min(values)) / 2 / middle if middle else 0.0
    return f"{shown} ±{spread:.0%}" if len(values) > 1 else shown
