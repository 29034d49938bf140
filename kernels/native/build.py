"""Compiles the C++ kernels on the machine that runs them; `python -m ...` does it in advance.

A wheel could not use all instructions of this processor. The library lies in the user's cache
folder, under a name made of the sources, the processor and the library's own bytes, because a file
that lost bytes, by a full disk or a power cut, would crash the process that loads it.

`RADIXCACHE_MARCH` is for tests: a level that the compiler knows, such as x86-64-v3, to be used
in place of this processor's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

_SOURCE = Path(__file__).with_name("native.cpp")  # includes the headers beside it
_COMPILERS = ("c++", "g++", "clang++")
_NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
# a * b + c is fused only where the source says so: all loops give the same sums.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


def build() -> Path:
    """The shared library for this processor; compiling it takes 15 seconds, once.

    Raises:
        OSError: there is no compiler, it fails, or no cache folder can be written to.
    """
    sources = sorted(_SOURCE.parent.glob("*.h")), [_SOURCE]
    text = b"".join(path.read_bytes() for paths in sources for path in paths)
    level = os.environ.get("RADIXCACHE_MARCH")
    flags = (*_FLAGS, f"-march={level}" if level else _NATIVE)
    key = hashlib.sha256(text + repr((flags, _processor())).encode())
    folder, name = _cache() / "radixcache", f"native-{key.hexdigest()[:16]}"
    library = _find(folder, name)
    if library is None:
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None:
            raise OSError(f"no C++ compiler ({', '.join(_COMPILERS)})")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process finds it compiled
            library = _find(folder, name) or _compile(compiler, flags, folder, name)
    return library


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None


def _find(folder: Path, name: str) -> Path | None:
    """The library of that name whose bytes are those that were compiled."""
    for library in folder.glob(f"{name}-*.so"):
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
