"""Runs a command in a process of its own: whatever becomes of it, the caller goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

GRACE = 10.0
"""Seconds between SIGTERM, at which it may say where it hangs, and SIGKILL."""

_LOOK = 0.2  # seconds


def run(command: Sequence[str], seconds: float, log: Path) -> tuple[int, str]:
    """Run a command with a time limit, its output into `log` and onto the screen.

    Whatever it has started goes with it.

    Returns:
        Its exit status, and what is wrong with the way it ended, or "".
    """
    end, told = monotonic() + seconds, ""
    with log.open("w") as out, log.open(errors="replace") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
                print(written.read(), end="", flush=True)
                if process.returncode is not None:
                    break
                if monotonic() > end + GRACE:
                    _signal(process.pid, signal.SIGKILL)
                elif monotonic() > end and not told:
                    told = f"took longer than its {seconds:g} s"
                    _signal(process.pid, signal.SIGTERM)
        finally:
            _signal(process.pid, signal.SIGKILL)  # and what it may have left behind
            process.wait()
    status = process.returncode
    if status < 0 and not told:
        names = {number.value: number.name for number in signal.Signals}
        told = f"killed by {names.get(-status, f'signal {-status}')}"
    elif status > 0 and not told:
        told = f"exit status {status}"
    return status, told


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
