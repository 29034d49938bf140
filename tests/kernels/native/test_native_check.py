"""The kernels by a program without Python; `make test-machines` runs it for another processor."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from radixcache.kernels.native.build import LEVELS, usable_levels
from tests.kernels.native.native_check import compile_check

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_threads_share_out_all_parts_of_a_job_and_race_for_none(tmp_path: Path) -> None:
    assert COMPILER is not None
    flags = ("-O1", "-g", "-fsanitize=thread")
    compile_check(COMPILER, tmp_path / "check", "-fsyntax-only", source="pool_check.cpp")
    try:
        program = compile_check(COMPILER, tmp_path / "check", *flags, source="pool_check.cpp")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no ThreadSanitizer")
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, timeout=200, errors="replace"
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run on this system")
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("source", ["native_check.cpp", "native_same.cpp"])
def test_programs_that_only_longer_runs_build_fit_the_kernels(source: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    compile_check(COMPILER, tmp_path / "check", "-fsyntax-only", source=source)


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


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("level", usable_levels()[:-1])
def test_the_kernels_are_right_at_each_level_above_the_lowest(level: str, tmp_path: Path) -> None:
    """Rows in 8 bits are compared with loops over whole numbers: all levels give the same bits."""
    assert COMPILER is not None
    program = compile_check(COMPILER, tmp_path / "check", "-O1", *LEVELS[level].flags.split())
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
