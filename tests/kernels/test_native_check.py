"""The kernels by a program without Python; `make test-machines` runs it for another processor."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.native_check import compile_check

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_kernels_are_right_and_each_comparison_can_fail(tmp_path: Path) -> None:
    assert COMPILER is not None
    program = compile_check(COMPILER, tmp_path / "check", "-O1")
    for arguments, good in (((), "passed"), (("wrong",), "failed")):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        told = re.findall(r"(\d+) (passed|failed)", done.stdout.splitlines()[-1])
        counts = {name: int(count) for count, name in told}
        assert counts.pop(good) > 500 and not any(counts.values()), done.stdout[-2000:]
