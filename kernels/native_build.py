"""Compiles `native.cpp` where it runs, once for each processor: `python -m ...` does it ahead.

A wheel that travels could not use what this processor has, and needs no compiler as it is: what was
compiled stands in the user's cache folder, under a name made of the source and the processor.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_SOURCE = Path(__file__).with_name("native.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
# No fusing of a * b + c but where the source says so: the same sums in every loop.
_FLAGS = ("-std=c++17", "-O3", _NATIVE, "-ffp-contract=off", "-fPIC", "-shared")


def build() -> Path:
    """The shared library for this processor, compiled if it is not there; takes ten seconds.

    Raises:
        OSError: there is no compiler, it fails, or the cache folder cannot be written to.
    """
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, _processor())).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    library = cache / "radixcache" / f"native-{key.hexdigest()[:16]}.so"
    if not library.exists():
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None:
            raise OSError(f"no C++ compiler ({', '.join(_COMPILERS)})")
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_name("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds it compiled
            if not library.exists():
                _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    part = library.with_suffix(".part")
    command = (compiler, *_FLAGS, "-o", part, _SOURCE)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise OSError(f"{compiler} failed: {said[0] if said else error}") from None
    part.replace(library)


def _processor() -> list[str]:
    """What tells one kind of processor from another."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return [platform.machine(), platform.processor(), platform.node()]
    told = ("model name", "flags", "CPU part", "Features")
    return [platform.machine(), *(line for line in first if line.startswith(told))]


if __name__ == "__main__":
    with suppress(OSError):
        build()
