"""The machine that a benchmark runs on, and what processes use of it. Linux only."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def conditions() -> str:
    """The machine, in one line."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load}, Python {python}"


def held_bytes(pid: int) -> int:
    """Memory of a process and its descendants: a page that n processes map counts as 1/n in each.

    `ProcessLookupError` if the process is gone.
    """
    if not Path(f"/proc/{pid}").exists():
        raise ProcessLookupError(f"no process {pid}")
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            children.setdefault(int(_stat(int(folder.name))[1]), []).append(int(folder.name))
        except OSError:  # ended meanwhile
            continue
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        todo += children.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
