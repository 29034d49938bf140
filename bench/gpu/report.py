"""Collects results as rows, prints and writes each at once, and merges them into one table."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path


class NotRun(Exception):
    """Raised where something cannot be checked or measured; the message says why."""


@dataclass
class Row:
    """One line of the report: ok, FAIL, not run, note; or measured, met, missed with a value."""

    name: str
    status: str
    text: str = ""
    value: float | None = None
    unit: str = ""
    aim: str = ""
    lines: list[str] = field(default_factory=list)
    section: str = ""

    @property
    def shown(self) -> str:
        return "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()

    def __str__(self) -> str:
        text = "; ".join(p for p in (self.shown, self.aim and f"aim {self.aim}", self.text) if p)
        head = f"{self.status:8} {self.name}" + (f": {text}" if text else "")
        return "\n".join([head, *(f"         | {line}" for line in self.lines)])

    def write(self, path: Path) -> None:
        """Print the row, and append it to a file of rows."""
        print(self, flush=True)
        with path.open("a", encoding="utf-8") as file:
            # Begins a new line, in case a process died while it wrote one.
            file.write("\n" + json.dumps(asdict(self), ensure_ascii=False) + "\n")


def figure(
    name: str,
    value: float,
    unit: str,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str = "",
    lines: Sequence[str] = (),
) -> Row:
    """A row for a measured value and its aim."""
    bounds = [("≤", at_most), ("≥", at_least)]
    aim = " ".join(f"{sign} {bound:.4g}" for sign, bound in bounds if bound is not None)
    missed = (at_most is not None and value > at_most) or (
        at_least is not None and value < at_least
    )
    status = "missed" if missed else "met" if aim else "measured"
    return Row(name, status, note, value, unit, aim, [*lines])


class Report:
    """Collects the rows of one section.

    Args:
        path: file for the rows, a line of JSON each.
        seconds: time after which no new check starts.
    """

    def __init__(self, section: str, path: Path, seconds: float) -> None:
        self.rows: list[Row] = []
        self._section, self._path = section, path
        self._end = time.monotonic() + seconds

    def check(self, name: str, work: Callable[..., str | None], *arguments: object) -> None:
        """Add a row that is ok unless `work` raises; its text is what `work` returns."""
        self.measure(name, lambda: [Row(name, "ok", work(*arguments) or "")])

    def measure(self, name: str, work: Callable[..., Iterable[Row]], *arguments: object) -> None:
        """Add each row that `work` yields; if it raises, a row that says so."""
        try:
            if time.monotonic() > self._end:
                raise NotRun("no time left")
            for row in work(*arguments):
                self._add(row)
        except Exception as error:
            kind = type(error).__name__
            if isinstance(error, NotRun) or kind == "MissingJITCacheError":  # kernel not packed
                self.note(name, str(error)[:200], status="not run")
                return
            first = str(error).strip().partition("\n")[0][:200]
            lines = "".join(traceback.format_exception(error)).splitlines()
            self.note(name, f"{kind}: {first}", lines, "FAIL")
            _check_device()

    def note(self, name: str, text: str, lines: Iterable[str] = (), status: str = "note") -> None:
        """Add a row without a value."""
        self._add(Row(name, status, text, lines=[*lines]))

    def _add(self, row: Row) -> None:
        row.section = self._section
        self.rows.append(row)
        row.write(self._path)


def _check_device() -> None:
    """End the section if the error sticks to the device: every later call would fail with it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_rows(folder: Path, sections: Iterable[str]) -> list[Row]:
    rows = []
    for section in sections:
        path = folder / f"{section}.jsonl"
        for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):  # its process died while it wrote the line
                rows.append(Row(**json.loads(line)))
    return rows


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| section | what | result | aim | |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row.section, row.name, row.status, row.aim, row.shown or row.text)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        if row.status == "FAIL":  # the last lines of its traceback
            lines += [f"| | `{line[:160].replace('|', '/')}` | | | |" for line in row.lines[-3:]]
    return "\n".join(lines)


def failed(rows: Iterable[Row]) -> bool:
    """Whether any row is FAIL, or no row has a result."""
    statuses = {row.status for row in rows}
    return "FAIL" in statuses or not {"ok", "met", "missed", "measured"} & statuses
