"""Prints tables, on a terminal or into a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, words: int = 0
) -> Table:
    """A table whose first `left` columns are names, and the others numbers.

    Args:
        words: the number of last columns with words, which wrap where there is no room.
    """
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(header):
        is_text = number >= len(header) - words
        justify: JustifyMethod = "left" if is_text or number < left else "right"
        shown.add_column(name, justify=justify, no_wrap=not is_text)
    for row in rows:
        shown.add_row(*map(plain, row))
    return shown


class _Console(Console):
    """Let the command line handle a closed pipe, as for all other output."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain(text: str) -> Text:
    """A text without markup or control characters."""
    return Text("".join(char if char.isprintable() else "\ufffd" for char in text))


def console(width: int = 80) -> Console:
    """Standard output; `width` columns wide where it is no terminal and COLUMNS is not set."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(width=None if known else width, highlight=False)
