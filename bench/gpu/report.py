"""What a run finds: rows that are printed and written as they are found, merged into one table."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path


class NotRun(Exception):
    """Something cannot be checked or measured here; the message says why."""


@dataclass
class Figure:
    """A measured value, and what it should be."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    lines: Sequence[str] = ()

    @property
    def aim(self) -> str:
        bounds = [("≤", self.at_most), ("≥", self.at_least)]
        return " ".join(f"{sign} {bound:.4g}" for sign, bound in bounds if bound is not None)

    @property
    def status(self) -> str:
        if not self.aim:
            return "measured"
        low = self.at_least is None or self.value >= self.at_least
        high = self.at_most is None or self.value <= self.at_most
        return "met" if low and high else "missed"


@dataclass
class Row:
    """One line of the report: ok, FAIL, not run, note; or measured, met, missed with a value."""

    section: str
    name: str
    status: str
    text: str = ""
    value: float | None = None
    unit: str = ""
    aim: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()

    def __str__(self) -> str:
        told = "; ".join(p for p in (self.shown, self.aim and f"aim {self.aim}", self.text) if p)
        head = f"{self.status:8} {self.name}" + (f": {told}" if told else "")
        return "\n".join([head, *(f"         | {line}" for line in self.lines)])

    def tell(self, path: Path) -> None:
        """Print it, and append it to a file of rows."""
        print(self, flush=True)
        with path.open("a", encoding="utf-8") as file:
            # On a line of its own, whatever a process that died has left before it.
            file.write("\n" + json.dumps(asdict(self), ensure_ascii=False) + "\n")


class Report:
    """Collects the rows of one section.

    Args:
        path: of its rows, one line of JSON each.
        seconds: after which nothing new is started.
    """

    def __init__(self, section: str, path: Path, seconds: float) -> None:
        self.rows: list[Row] = []
        self._section, self._path = section, path
        self._end = time.monotonic() + seconds

    def check(self, name: str, work: Callable[..., str | None], *arguments: object) -> None:
        """A row that is ok unless `work` raises; what it returns is told along."""
        self._try(name, lambda: self.tell(name, work(*arguments) or "", status="ok"))

    def measure(
        self, name: str, work: Callable[..., Figure | Iterable[Figure]], *arguments: object
    ) -> None:
        """A row for each figure of `work`."""

        def all_figures() -> None:
            found = work(*arguments)
            for f in [found] if isinstance(found, Figure) else found:
                self._add(
                    Row(self._section, f.name, f.status, f.note, f.value, f.unit, f.aim, [*f.lines])
                )

        self._try(name, all_figures)

    def tell(self, name: str, text: str, lines: Iterable[str] = (), status: str = "note") -> None:
        self._add(Row(self._section, name, status, text, lines=[*lines]))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        if time.monotonic() > self._end:
            self.tell(name, "no time left", status="not run")
            return
        try:
            work()
        except NotRun as error:
            self.tell(name, _first_line(error), status="not run")
        except Exception as error:
            if type(error).__name__ == "MissingJITCacheError":
                why = "FlashInfer's kernel for it is not there, and may not be built"
                self.tell(name, why, status="not run")
                return
            lines = "".join(traceback.format_exception(error)).splitlines()
            self.tell(name, f"{type(error).__name__}: {_first_line(error)}", lines, "FAIL")
            _check_device()

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        row.tell(self._path)


def _check_device() -> None:
    """End the section if the error sticks to the device: every later call would fail with it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def read_rows(folder: Path, sections: Iterable[str]) -> list[Row]:
    rows = []
    for section in sections:
        path = folder / f"{section}.jsonl"
        for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):  # its process died in the middle of it
                rows.append(Row(**json.loads(line)))
    return rows


def table(rows: Iterable[Row]) -> str:
    lines = ["| section | what | result | aim | |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row.section, row.name, row.status, row.aim, row.shown or row.text)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        if row.status == "FAIL":  # what it said last
            lines += [f"| | `{line[:160].replace('|', '/')}` | | | |" for line in row.lines[-3:]]
    return "\n".join(lines)


def failed(rows: Iterable[Row]) -> bool:
    """Whether any row is FAIL, or nothing at all was found right."""
    statuses = {row.status for row in rows}
    return "FAIL" in statuses or not {"ok", "met", "missed", "measured"} & statuses
