"""The machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform


def conditions() -> str:
    """The machine, in one line."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load}, Python {python}"
