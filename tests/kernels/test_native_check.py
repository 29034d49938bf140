"""The kernels by a program without Python; `make test-machines` runs it for another processor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.native_check import compile_check, run_check

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    # In half the time; optimised in full they are what `make test-machines` checks.
    return compile_check(COMPILER, tmp_path_factory.mktemp("check") / "check", "-O1")


def test_the_kernels_are_right_and_rows_the_same_in_any_company(program) -> None:
    checked = run_check(program)
    assert not checked.failed, checked.said
    assert checked.passed > 500


def test_each_of_its_comparisons_can_fail(program) -> None:
    checked = run_check(program, "wrong")
    assert not checked.passed and checked.failed > 500
