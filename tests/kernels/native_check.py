"""Compiles `native_check.cpp`, which tries the kernels without Python, and runs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread")
_SOURCE = Path(__file__).with_name("native_check.cpp")


class Checked(NamedTuple):
    """What the program said in its last line, and all that it said.

    Attributes:
        hash: of all that the kernels gave.
    """

    passed: int
    failed: int
    hash: str
    said: str


def compile_check(compiler: str, program: Path, *flags: str) -> Path:
    """The program, compiled; CalledProcessError if that fails."""
    subprocess.run((compiler, *FLAGS, *flags, _SOURCE, "-o", program), check=True)
    return program


def run_check(*command: str | Path) -> Checked:
    """Run the program, under an emulator or not.

    Raises:
        RuntimeError: it ended before its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = re.search(r"^(\d+) passed, (\d+) failed, .* hash (\w+)\n\Z", done.stdout, re.MULTILINE)
    if last is None or done.returncode not in (0, 1):
        raise RuntimeError(f"it ended with {done.returncode}: {done.stdout[-500:]}{done.stderr}")
    return Checked(int(last[1]), int(last[2]), last[3], done.stdout)
