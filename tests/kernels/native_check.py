"""Compiles `native_check.cpp`, which tries the kernels without Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread")
_SOURCE = Path(__file__).with_name("native_check.cpp")


def compile_check(compiler: str, program: Path, *flags: str) -> Path:
    """The program, compiled; CalledProcessError if that fails."""
    subprocess.run((compiler, *FLAGS, *flags, _SOURCE, "-o", program), check=True)
    return program
