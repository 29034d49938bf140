"""One way to show a table, wherever it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table whose first `left` columns are text, and the others numbers."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(header):
        shown.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def console(width: int = 140) -> Console:
    """Standard output; `width` columns wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def as_markdown(shown: Table) -> str:
    """The same table in Markdown."""
    out = Console(file=StringIO(), width=1000)
    shown.box, shown.pad_edge = box.MARKDOWN, True
    out.print(shown)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
