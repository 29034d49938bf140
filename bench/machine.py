"""Describes the machine of a benchmark, and measures memory (Linux only) and time."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path


def conditions() -> str:
    """The machine, in one line."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load}, Python {python}"


def held_bytes(pid: int) -> int:
    """Memory of a process and its descendants: a page that n processes map counts as 1/n in each.

    `OSError` if the process is gone.
    """
    process = Path(f"/proc/{pid}")
    lines = (process / "smaps_rollup").read_text().splitlines()
    held = sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    for children in process.glob("task/*/children"):
        for child in children.read_text().split():
            with suppress(OSError):  # ended meanwhile
                held += held_bytes(int(child))
    return held


class Stopwatch:
    """Measures thread CPU time by phase, without the cost of reading the clock.

    Each `lap` books the time since the last `start` or `lap`.
    """

    def __init__(self) -> None:
        self.ns: dict[str, float] = {}
        self.cost = 0.0
        """Nanoseconds of an empty lap."""
        laps = []
        for _ in range(50):
            self.start()
            for _ in range(100):
                self.lap("nothing")
            laps.append(self.take()["nothing"] / 100)
        self.cost = sorted(laps)[len(laps) // 2]

    def start(self) -> None:
        self._last = time.thread_time_ns()

    def lap(self, phase: str) -> None:
        now = time.thread_time_ns()
        self.ns[phase] = self.ns.get(phase, 0.0) + now - self._last - self.cost
        self._last = time.thread_time_ns()

    def take(self) -> dict[str, float]:
        """The times so far, nanoseconds by phase; starts again from nothing."""
        ns, self.ns = self.ns, {}
        return ns
