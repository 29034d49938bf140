"""What a run finds: rows that are printed at once, and written as JSON after every section."""

from __future__ import annotations

import json
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

GRACE = 5.0
"""Seconds that a check may take beyond its section's end before it is interrupted."""


class NotRun(Exception):
    """Something cannot be checked or measured here; the message says why."""


class DeviceLost(Exception):
    """The GPU answers no more: whatever comes after would fail for that reason."""


class _OutOfTime(BaseException):
    """Not an `Exception`: what is being measured must not swallow it."""


@dataclass
class Figure:
    """A measured value, and what it should be.

    `explain` says where the time goes; it is asked only if the aim is missed.
    """

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    explain: Callable[[], list[str]] | None = None

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
    """One line of the report: ok, FAIL, not run; or measured, met, missed with a value."""

    section: str
    name: str
    status: str
    text: str = ""
    value: float | None = None
    unit: str = ""
    aim: str = ""
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        told = "; ".join(
            part for part in (value, self.aim and f"aim {self.aim}", self.text) if part
        )
        return f"{self.status:8} {self.name}" + (f": {told}" if told else "")


class Report:
    """Collects rows.

    Args:
        path: of the JSON.
        facts: about the machine and the versions, written along.
        seconds: after which nothing new is started.
    """

    def __init__(self, path: Path, facts: dict[str, Any], seconds: float) -> None:
        self.path, self.facts = path, facts
        self.rows: list[Row] = []
        self.ceilings: dict[str, float] = {}
        """What the device reaches at best: "bytes/s", "flop/s", "launch s"."""
        self._start = time.monotonic()
        self._end = self._deadline = self._start + seconds
        self._section = ""

    @contextmanager
    def section(self, name: str, seconds: float) -> Iterator[None]:
        """The rows of the body belong to `name`; nothing in it starts after `seconds`."""
        self._section, start = name, time.monotonic()
        self._deadline = min(self._end, start + seconds)
        print(f"\n== {name}", flush=True)
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:  # not in a check: the section's own preparations
            self._fail("preparations", error)
        finally:
            print(f"   {time.monotonic() - start:.1f} s", flush=True)
            self.save()

    def check(self, name: str, work: Callable[[], str | None]) -> None:
        """A row that is ok unless `work` raises; what it returns is told along."""
        if self._out_of_time(name):
            return
        with self._guarded(name):
            text = work()
            self._add(Row(self._section, name, "ok", text or ""))

    def measure(self, name: str, work: Callable[[], Figure | Iterable[Figure]]) -> None:
        """A row for each figure of `work`."""
        if self._out_of_time(name):
            return
        with self._guarded(name):
            found = work()
            for figure in [found] if isinstance(found, Figure) else found:
                lines = figure.explain() if figure.explain and figure.status == "missed" else []
                self._add(
                    Row(
                        self._section,
                        figure.name,
                        figure.status,
                        figure.note,
                        figure.value,
                        figure.unit,
                        figure.aim,
                        lines,
                    )
                )

    def tell(self, name: str, text: str) -> None:
        """A row that is neither: a conclusion, or something that was not checked."""
        self._add(Row(self._section, name, "note", text))

    def not_run(self, name: str, why: str) -> None:
        self._add(Row(self._section, name, "not run", why))

    @property
    def failed(self) -> bool:
        """Whether any row is FAIL, or nothing at all was found right."""
        statuses = [row.status for row in self.rows]
        return "FAIL" in statuses or not {"ok", "met", "missed", "measured"} & set(statuses)

    def _out_of_time(self, name: str) -> bool:
        if time.monotonic() <= self._deadline:
            return False
        self.not_run(name, "no time left")
        return True

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            with _interrupted_after(self._deadline - time.monotonic() + GRACE):
                yield
        except (NotRun, ImportError) as error:
            self.not_run(name, _first_line(error))
        except _OutOfTime:
            self.not_run(name, "took longer than its section has")
        except Exception as error:
            if type(error).__name__ == "MissingJITCacheError":
                self.not_run(name, "FlashInfer's kernel for it is not there, and may not be built")
            else:
                self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        lines = traceback.format_exception(error)[-6:]
        text = f"{type(error).__name__}: {_first_line(error)}"
        self._add(Row(self._section, name, "FAIL", text, lines="".join(lines).splitlines()))
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except Exception:
                raise DeviceLost(f"after {self._section}: {name}") from error

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)
        for line in row.lines:
            print(f"         | {line}", flush=True)

    def save(self) -> None:
        """Write everything found so far."""
        found = {
            **self.facts,
            "seconds": round(time.monotonic() - self._start, 1),
            "ceilings": self.ceilings,
            "rows": [asdict(row) for row in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1, ensure_ascii=False))

    def table(self) -> str:
        """A Markdown table of all rows."""
        lines = ["| section | what | result | aim | |", "|---|---|---|---|---|"]
        for row in self.rows:
            value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
            cells = (row.section, row.name, row.status, row.aim, value or row.text)
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        return "\n".join(lines)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise in the body when the time is up; only where signals can be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    # Again every 10 seconds: raised in a finalizer, it is lost.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
