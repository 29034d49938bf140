"""The table of what was measured."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from tests.gpu.table import Table, cells


def test_rows_of_tests_are_printed_at_once_and_as_one_table_at_the_end() -> None:
    printed: list[str] = []
    terminal: Any = SimpleNamespace(write_line=printed.append, section=printed.append)
    table = Table()
    plugins = SimpleNamespace(getplugin={"terminalreporter": terminal}.get)
    session: Any = SimpleNamespace(config=SimpleNamespace(pluginmanager=plugins))
    table.pytest_sessionstart(session)
    table.pytest_terminal_summary(terminal)
    assert printed == []
    rows = [
        cells("decode, 1|2 rows", 1.257, "x floor", 1.25, "step 5 ms"),
        cells("a hit", 6.6, "ms", 6.7),
        cells("equal", "9 of 9 tokens"),
    ]
    report: Any = SimpleNamespace(when="call", user_properties=[("row", row) for row in rows])
    table.pytest_runtest_logreport(report)
    report.when = "teardown"
    table.pytest_runtest_logreport(report)
    assert printed[0] == "\ndecode, 1|2 rows, 1.257 x floor, ≤ 1.25, missed, step 5 ms"
    assert len(printed) == 3
    table.pytest_terminal_summary(terminal)
    assert printed[3] == "measured" and f"torch {version('torch')}, " in printed[4]
    assert printed[5:] == [
        "",
        "| what | result | aim |  |",
        "| --- | --- | --- | --- |",
        "| decode, 1/2 rows | 1.257 x floor | ≤ 1.25, missed | step 5 ms |",
        "| a hit | 6.6 ms | ≤ 6.7, met |  |",
        "| equal | 9 of 9 tokens |  |  |",
    ]
