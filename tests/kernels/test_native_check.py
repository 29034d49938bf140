"""The kernels by a program without Python; `make test-machines` runs it for another processor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.native_check import compile_check, run_check

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_kernels_are_right_and_each_comparison_can_fail(tmp_path: Path) -> None:
    assert COMPILER is not None
    program = compile_check(COMPILER, tmp_path / "check", "-O1")
    checked, wrong = run_check(program), run_check(program, "wrong")
    assert not checked.failed and checked.passed > 500, checked.said
    assert not wrong.passed and wrong.failed > 500
