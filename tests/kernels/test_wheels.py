"""Wheels that hold the kernels: their form, and that their bits are those of a local build."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from radixcache.kernels.native.build import LEVELS, build_ahead, usable_levels
from release.wheels import LIBRARIES, add_libraries, compiler_for, glibc_of
from tests.helpers.sources import PACKAGES, ROOT, installed_path
from tests.kernels.native.native_check import FLAGS

HERE = platform.machine()


def test_a_wheel_with_libraries_lists_each_file_and_says_what_it_needs(tmp_path, monkeypatch):
    plain, library = tmp_path / "a-1-py3-none-any.whl", tmp_path / "level-0.so"
    library.write_bytes(b"library")
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("a.py", "a = 1\n")
        archive.writestr("a-1.dist-info/WHEEL", "Root-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("a-1.dist-info/METADATA", "License-Expression: Apache-2.0\n")
        archive.writestr("a-1.dist-info/RECORD", "a.py,,\n")
    needs = {library: (2, 34)}
    monkeypatch.setattr("release.wheels.glibc_of", needs.__getitem__)
    wheel = add_libraries(plain, "x86_64", [library])
    assert wheel.name == "a-1-py3-none-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files["radixcache/kernels/native/level-0.so"] == b"library"
    told = files["a-1.dist-info/WHEEL"].decode()
    assert told == "Root-Is-Purelib: false\nTag: py3-none-manylinux_2_34_x86_64\n"
    assert b" AND GPL-3.0-or-later WITH GCC" in files["a-1.dist-info/METADATA"]
    rows = list(csv.reader(io.StringIO(files.pop("a-1.dist-info/RECORD").decode())))
    assert rows.pop() == ["a-1.dist-info/RECORD", "", ""]
    for name, digest, size in rows:
        data = files.pop(name)
        encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={encoded}", str(len(data)))
    assert not files


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("(NEEDED) Shared library: [libc.so.6]\n Name: GLIBC_2.9 x\n Name: GLIBC_2.17", (2, 17)),
        ("(NEEDED) Shared library: [libstdc++.so.6]\n Name: GLIBC_2.9", "needs libstdc"),
    ],
)
def test_the_c_library_that_a_library_needs_is_read_from_it(told, found, tmp_path, monkeypatch):
    (tmp_path / "readelf").write_text(f"#!/bin/sh\nprintf '%s' '{told}'")
    (tmp_path / "readelf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            glibc_of(tmp_path)
    else:
        assert glibc_of(tmp_path) == found


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    """Of the best and the lowest level that this machine can run: compiling one takes half a
    minute, and `test_native_check` tries all."""
    compiler = compiler_for(HERE)
    if compiler is None:
        pytest.skip("no GCC for Linux on this processor")
    levels = dict.fromkeys(usable_levels()[:1] + usable_levels()[-1:])
    return {level: build_ahead(LIBRARIES, level, compiler) for level in levels}


def bits(folder: Path, level: str, cwd: Path, **variables: str) -> tuple[str, list[str]]:
    """The library's path and the digests of a process that finds the package in `folder`."""
    variables["RADIXCACHE_MARCH"] = level
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    command = (sys.executable, "-m", "tests.kernels.bits")
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    path, *digests = done.stdout.splitlines()
    return path, digests


@pytest.mark.exhaustive
@pytest.mark.skipif(not usable_levels(), reason="wheels hold no kernels for this processor")
def test_the_bits_of_a_level_are_those_of_a_local_build(libraries, tmp_path):
    installed = tmp_path / "installed"
    for name in PACKAGES:
        links = shutil.ignore_patterns(*PACKAGES[1:]) if name == PACKAGES[0] else None
        target = installed_path(Path(name)) if links is None else name
        shutil.copytree(ROOT / name, installed / target, ignore=links)
    for library in libraries.values():
        shutil.copy(library, installed / "radixcache/kernels/native")
    best, *others = libraries
    builds = {best: ["native", best], "x86-64": ["x86-64"], "armv8-a": ["armv8-a"]}
    seen = set()
    for level in (best, *others):
        path, ahead = bits(installed, level, tmp_path, PATH=str(tmp_path))
        assert Path(path).is_relative_to(installed), "it was compiled"
        seen.add(tuple(ahead))
        for local in builds.get(level, []):
            path, here = bits(ROOT, local, tmp_path)
            assert not Path(path).is_relative_to(installed) and ahead == here, level
    assert len(seen) <= 4  # by the width of vectors, and pairs of bfloat16


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [name for name, of in LEVELS.items() if of.machine != HERE])
def test_the_bits_for_another_processor_are_those_of_a_build_there_under_an_emulator(
    level, tmp_path
):
    machine = LEVELS[level].machine
    compiler, emulator = compiler_for(machine), shutil.which(f"qemu-{machine}")
    if compiler is None or emulator is None:
        pytest.skip(f"no compiler or no emulator for {machine}")
    library = build_ahead(LIBRARIES, level, compiler)
    newer = {"armv8-a": "-mcpu=neoverse-n1"}.get(level, LEVELS[level].flags)
    source, program = ROOT / "tests/kernels/native/native_same.cpp", tmp_path / "same"
    subprocess.run((compiler, *FLAGS, newer, source, "-o", program), check=True)
    for arguments, last in (
        ((), r"\d{3} passed, 0 failed"),
        (("wrong",), r"\d passed, \d{2,3} failed"),
    ):
        command = (emulator, "-L", f"/usr/{machine}-linux-gnu", program, library, *arguments)
        done = subprocess.run(command, capture_output=True, text=True)
        assert re.search(rf"^{last}\n\Z", done.stdout, re.M), done


@pytest.mark.exhaustive
def test_compiled_kernels_need_a_c_library_of_2_34_and_no_other_library(libraries):
    assert libraries and all(glibc_of(path) <= (2, 34) for path in libraries.values())
