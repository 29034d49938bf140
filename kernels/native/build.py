"""Finds the C++ kernels for this processor, or compiles them; `python -m ...` does it in advance.

A wheel of this processor's kind holds a library for each level of it, and the best that the
processor can run is taken, if the package's sources are those that it was made of. Elsewhere, as in
a checkout, they are compiled for the processor at hand, into the user's cache folder. A library's
name is made of the sources, the flags and its own bytes, because a file that lost bytes, by a full
disk or a power cut, would crash the process that loads it.

`RADIXCACHE_MARCH` names the level that is used in place of the best: one of `LEVELS`, or another
that the compiler knows. With `native` they are always compiled for this very processor.
"""

from __future__ import annotations

import fcntl
import grp
import hashlib
import os
import platform
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_name("native.cpp")  # includes the headers beside it
_COMPILERS = ("c++", "g++", "clang++")
_NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
# a * b + c is fused only where the source says so: all loops give the same sums.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


class Level(NamedTuple):
    """Processors that can run the same library.

    Attributes:
        machine: as `platform.machine()` calls them.
        flags: of the compiler.
        needs: words that /proc/cpuinfo has of them.
    """

    machine: str
    flags: str
    needs: str = ""


_V3 = "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe popcnt sse4_1 sse4_2 ssse3"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
LEVELS = {  # the best first
    "x86-64-v4-bf16": Level(
        "x86_64",
        "-march=x86-64-v4 -mavx512bf16 -mavx512vnni",
        f"{_V4} avx512_bf16 avx512_vnni",
    ),
    "x86-64-v4-vnni": Level("x86_64", "-march=x86-64-v4 -mavx512vnni", f"{_V4} avx512_vnni"),
    "x86-64-v4": Level("x86_64", "-march=x86-64-v4", _V4),
    "x86-64-v3-vnni": Level("x86_64", "-march=x86-64-v3 -mavxvnni", f"{_V3} avx_vnni"),
    "x86-64-v3": Level("x86_64", "-march=x86-64-v3", _V3),
    "x86-64": Level("x86_64", "-march=x86-64"),
    "armv8.2-a": Level("aarch64", "-march=armv8.2-a+dotprod", "asimd asimddp"),
    "armv8-a": Level("aarch64", "-march=armv8-a"),
}


def build() -> Path:
    """The shared library for this processor; compiling one takes about half a minute, once.

    Raises:
        OSError: none is here, and there is no compiler, it fails, or no cache folder can be
            written to, or others can; or `RADIXCACHE_MARCH` names a level that cannot run here.
    """
    level = os.environ.get("RADIXCACHE_MARCH", "")
    if level in LEVELS and level not in usable_levels():  # it would end the process
        raise OSError(f"this processor cannot run {level}, which RADIXCACHE_MARCH names")
    for name in (level,) if level else usable_levels():
        if name in LEVELS and (library := _find(_SOURCE.parent, _name(name, flags_of(name)))):
            return library
    if level in LEVELS:
        flags = flags_of(level)
    else:
        flags = (*_FLAGS, f"-march={level}" if level not in ("", "native") else _NATIVE)
    folder, name = _cache() / "radixcache", _name("native", (*flags, *_processor()))
    if folder.exists():
        _refuse_strangers(folder)
    return _find(folder, name) or _compile_locked(folder, name, flags)


def usable_levels() -> list[str]:
    """The names of the levels that this processor can run, the best first."""
    here = set(" ".join(_processor()).split())
    return [
        name
        for name, level in LEVELS.items()
        if level.machine == platform.machine() and here.issuperset(level.needs.split())
    ]


def flags_of(level: str) -> tuple[str, ...]:
    return (*_FLAGS, *LEVELS[level].flags.split())


def build_ahead(folder: Path, level: str, compiler: str) -> Path:
    """The library of a level for wheels: it needs no C++ library; `OSError` as `build`."""
    name, flags = _name(level, flags_of(level)), flags_of(level)
    own = ("-static-libstdc++", "-Wl,--gc-sections,--exclude-libs,ALL", "-s")
    return _find(folder, name) or _compile_locked(folder, name, (*flags, *own), compiler)


def _name(prefix: str, parts: Sequence[str]) -> str:
    """What a library of these sources is called, before the digest of its bytes."""
    sources = [*sorted(_SOURCE.parent.glob("*.h")), _SOURCE]
    text = b"".join(path.read_bytes() for path in sources)
    return f"{prefix}-{hashlib.sha256(text + repr(tuple(parts)).encode()).hexdigest()[:16]}"


def _compile_locked(folder: Path, name: str, flags: tuple[str, ...], compiler: str = "") -> Path:
    compiler = compiler or next(filter(None, map(shutil.which, _COMPILERS)), "")
    if not compiler:
        raise OSError(f"no C++ compiler ({', '.join(_COMPILERS)})")
    folder.mkdir(0o755, parents=True, exist_ok=True)
    _refuse_strangers(folder)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process finds it compiled
        return _find(folder, name) or _compile(compiler, flags, folder, name)


def _cache() -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:  # the XDG specification ignores a relative path, which may lead into anybody's folder
        return named if named.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None


def _refuse_strangers(place: Path) -> None:
    """`OSError` if a library there could be of a user who has no say in what this process runs."""
    found, trusted = place.stat(), {0, os.getuid(), _SOURCE.stat().st_uid}
    others = 0o002 if _is_own(found) else 0o022
    if found.st_uid not in trusted or found.st_mode & others:
        raise OSError(f"other users can write to {place}, so no kernels are loaded from there")


def _is_own(found: os.stat_result) -> bool:
    """Whether the group of a file is its owner's private one, as useradd makes them."""
    with suppress(KeyError):  # an id without a name
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid)
        return [group.gr_name, *group.gr_mem] in ([owner], [owner] * 2)
    return False


def _find(folder: Path, name: str) -> Path | None:
    """The library of that name whose bytes are those that were compiled."""
    for library in folder.glob(f"{name}-*.so"):
        with suppress(OSError):  # one that cannot be read, or was put there by others
            if folder != _SOURCE.parent:
                _refuse_strangers(library)
            if library.stem == f"{name}-{_digest(library)}":
                return library
    return None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], folder: Path, name: str) -> Path:
    part = folder / f"{name}.part"
    command = (compiler, *flags, "-o", str(part), str(_SOURCE))
    # Into a file: a pipe is also held by what the compiler has started, and that may hang.
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(
                command,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=300,
            )
        except subprocess.SubprocessError as error:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines() or [str(error)]
            first = next((line for line in lines if "error:" in line), lines[0])
            raise OSError(f"{compiler} failed: {first}") from None
    return part.replace(folder / f"{name}-{_digest(part)}.so")


def _processor() -> list[str]:
    """Lines that tell one kind of processor from another."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return [platform.machine(), platform.processor(), platform.node()]
    fields = ("model name", "flags", "CPU part", "Features")
    return [platform.machine(), *(line for line in first if line.startswith(fields))]


if __name__ == "__main__":
    with suppress(OSError):
        build()
