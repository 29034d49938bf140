"""The machine that a benchmark runs on, and what processes use of it. Linux only."""

from __future__ import annotations

import os
import platform
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
