"""Compiles programs that try the kernels without Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread")


def compile_check(
    compiler: str, program: Path, *flags: str, source: str = "native_check.cpp"
) -> Path:
    """The program, compiled; CalledProcessError if that fails."""
    path = Path(__file__).with_name(source)
    subprocess.run((compiler, *FLAGS, *flags, path, "-o", program), check=True)
    return program
