"""Collects what the tests of a GPU measure, prints each figure at once, and all as one table."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

PACKAGES = ("torch", "flashinfer-python", "triton", "transformers", "numpy")

Cells = list[str]
"""What was measured, the result, its aim and a note."""


def cells(
    name: str, value: float | str, unit: str = "", at_most: float | None = None, note: str = ""
) -> Cells:
    """A row of the table; an aim is met or missed, which fails no test."""
    aim = ""
    if at_most is not None:
        aim = f"≤ {at_most:.4g}, {'met' if float(value) <= at_most else 'missed'}"
    shown = value if isinstance(value, str) else f"{value:.4g} {unit}"
    return [name, shown, aim, note]


def as_markdown(rows: list[Cells]) -> list[str]:
    lines = [["what", "result", "aim", ""], ["---"] * 4, *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def machine() -> str:
    """The GPU, its driver and the versions of packages, in one line."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        found = [done.stdout.strip()]
    except (OSError, subprocess.TimeoutExpired) as error:
        found = [str(error)]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


class Table:
    """A plugin of pytest that gathers the property `row` of tests."""

    def __init__(self) -> None:
        self.rows: list[Cells] = []
        self._terminal: Any = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal = session.config.pluginmanager.getplugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        found: list[Any] = [row for name, row in report.user_properties if name == "row"]
        for row in found:
            self._terminal.write_line("\n" + ", ".join(filter(None, row)))
        self.rows += found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.rows:
            terminalreporter.section("measured")
            for line in [machine(), "", *as_markdown(self.rows)]:
                terminalreporter.write_line(line)
