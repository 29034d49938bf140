"""Builds what a release consists of, into `dist/`: `make wheel`.

A source distribution; a wheel for any platform, which compiles the kernels where it is installed;
and for each kind of processor whose compiler is here a wheel that holds them compiled, for each
level of `kernels/native/build.py`. Such a wheel's tag names the C library that its kernels need, as
`readelf` tells.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from radixcache.kernels.native.build import LEVELS, build_ahead

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ROOT / "build" / "native"
"""The compiled kernels, which are kept until their sources change."""

_PLACE = "radixcache/kernels/native"
_LICENSE, _LINKED = (
    b"License-Expression: Apache-2.0",
    b" AND GPL-3.0-or-later WITH GCC-exception-3.1",
)
# What any Linux with the C library has; libgcc_s is as old as the names that it is asked for.
_SYSTEM = r"lib(c|m|pthread|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"


def main() -> int:
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    subprocess.run((sys.executable, "-m", "build", "--no-isolation", ROOT), check=True)
    (plain,) = (ROOT / "dist").glob("*-any.whl")
    for machine in dict.fromkeys(level.machine for level in LEVELS.values()):
        compiler = compiler_for(machine)
        if compiler is None:
            print(f"no wheel for {machine}: there is no {machine}-linux-gnu-g++")
        else:
            add_libraries(plain, machine, libraries_of(machine, compiler))
    for file in sorted((ROOT / "dist").iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")
    return 0


def compiler_for(machine: str) -> str | None:
    """GCC for that kind of processor under Linux; None if it is not here.

    clang gives the same bits, but decodes weights of 4 bits with AVX-512 a fifth slower or more:
    it computes the addresses that are prefetched anew in each block.
    """
    own = "g++" if (platform.system(), platform.machine()) == ("Linux", machine) else ""
    return shutil.which(f"{machine}-linux-gnu-g++") or shutil.which(own)


def libraries_of(machine: str, compiler: str) -> list[Path]:
    """The kernels of each level of a kind of processor."""
    levels = [name for name, level in LEVELS.items() if level.machine == machine]
    return [build_ahead(LIBRARIES, level, compiler) for level in levels]


def glibc_of(library: Path) -> tuple[int, int]:
    """The lowest version of the C library that has all that this one asks for.

    Raises:
        ValueError: it needs something else that a machine may not have.
    """
    command = ("readelf", "--wide", "--dynamic", "--version-info", library)
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", told):
        if not re.fullmatch(_SYSTEM, needed):
            raise ValueError(f"{library.name} needs {needed}")
    versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", told)
    return max((int(major), int(minor)) for major, minor in versions)


def add_libraries(plain: Path, machine: str, libraries: list[Path]) -> Path:
    """The wheel `plain` with these beside `native.cpp`, under the tag of that machine."""
    major, minor = max(map(glibc_of, libraries))
    tag = f"py3-none-manylinux_{major}_{minor}_{machine}"
    wheel = plain.with_name(plain.name.replace("py3-none-any", tag))
    record, rows = "", []
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        when = old.infolist()[0].date_time

        def add(name: str, data: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            rows.append((name, f"sha256={digest}", len(data)))
            info = zipfile.ZipInfo(name, when)
            info.external_attr = 0o100644 << 16
            new.writestr(info, data, zipfile.ZIP_DEFLATED)

        for name in old.namelist():
            data = old.read(name)
            if name.endswith(".dist-info/WHEEL"):
                data = data.replace(b"py3-none-any", tag.encode())
                data = data.replace(b"Purelib: true", b"Purelib: false")
            if name.endswith(".dist-info/METADATA"):
                data = data.replace(_LICENSE, _LICENSE + _LINKED, 1)
            if name.endswith(".dist-info/RECORD"):
                record = name
            else:
                add(name, data)
        for library in libraries:
            add(f"{_PLACE}/{library.name}", library.read_bytes())
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        new.writestr(zipfile.ZipInfo(record, when), text.getvalue(), zipfile.ZIP_DEFLATED)
    return wheel


if __name__ == "__main__":
    sys.exit(main())
