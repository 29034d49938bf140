"""What a machine can change, tried as on other machines: `make test-machines`.

    python -m tests.scripts.machines                  # all profiles
    python -m tests.scripts.machines avx2 aarch64     # some of them
    python -m tests.scripts.machines avx2 -- -k exact -x    # pytest is told more

A profile is a processor, a compiler, threads or versions. Those of versions get an environment of
their own in `.venv-machines/`, made once; torch takes 5 GB there, unless pip finds a CPU build.
Each runs the tests of kernels, model and engine, with exact mode and sampling among them; aarch64
runs `kernels/native_check.cpp`, cross-compiled, under qemu. A profile that this machine cannot have
is named in the table, and fails nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from radixcache.kernels.native.build import usable_levels
from tests.helpers.sources import ROOT
from tests.kernels.native.native_check import compile_check

FOLDERS = ("tests/kernels", "tests/runtime/model", "tests/runtime/engine")
EVERYTHING = (*FOLDERS, "tests/runtime/server", "tests/runtime/tokens")
PROCESSES = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
RUNNING = "{}.{}".format(*sys.version_info[:2])
ENVIRONMENTS = ROOT / ".venv-machines"
TESTING = (
    "accelerate gguf httpx2 hypothesis jsonschema packaging pydantic pytest pytest-xdist".split()
)

PROBE = """
import os, platform, numpy, torch, transformers
torch.set_num_threads(int(os.environ.get("TEST_THREADS") or torch.get_num_threads()))
from radixcache.kernels.native.library import problem
threads = torch.get_num_threads()
print(
    torch.backends.cpu.get_cpu_capability(), problem() or "native kernels",
    f"{threads} thread{'s' * (threads > 1)}", f"Python {platform.python_version()}",
    f"torch {torch.__version__}", f"transformers {transformers.__version__}",
    f"NumPy {numpy.__version__}", os.environ["VERSIONS"], sep=", ",
)
"""


class Impossible(Exception):
    """This machine cannot have the profile; says why."""


class Outcome(NamedTuple):
    """What came of a profile."""

    passed: bool
    machine: str
    summary: str


@dataclass(frozen=True)
class Profile:
    """The tests under other variables, perhaps by another interpreter.

    Attributes:
        proof: what the probe has to say, or the profile is not what it claims.
        hides_programs: whether PATH is empty, and nothing is found that was compiled before.
        version: of Python, in an environment of its own, or several, the best first; None for the
            one that runs this.
        versions: which ones that environment gets: those of constraints.txt, the lowest that
            pyproject.toml admits, or the newest there are, of the server's needs too, but that
            torch is of constraints.txt.
    """

    proof: str
    variables: dict[str, str] = field(default_factory=dict)
    hides_programs: bool = False
    version: str | None = None
    versions: Literal["tested", "lowest", "newest"] = "tested"

    def run(self, name: str, options: list[str]) -> Outcome:
        """
        Raises:
            Impossible: this machine cannot have it.
        """
        if "RADIXCACHE_MARCH" in self.variables and platform.machine() not in ("x86_64", "AMD64"):
            raise Impossible("the processor is not of that kind")
        if self.variables.get("RADIXCACHE_MARCH") in usable_levels()[:1]:
            raise Impossible("the processor has no more: `make test` is the same")
        python = sys.executable
        if self.version is not None:
            python = make_environment(ENVIRONMENTS / name, self.version, self.versions)
        with tempfile.TemporaryDirectory() as folder:
            environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
            environment |= {**self.variables, "VERSIONS": f"{self.versions} versions"}
            if self.hides_programs:
                environment |= {"PATH": folder, "XDG_CACHE_HOME": folder}
            _, machine = show((python, "-c", PROBE), environment)
            if self.proof not in machine:
                return Outcome(False, machine, f"it is not {self.proof}")
            folders = EVERYTHING if self.versions == "newest" else FOLDERS
            wanted = () if any(option.startswith("tests/") for option in options) else folders
            command = (python, "-m", "pytest", *PROCESSES, *options, *wanted)
            status, summary = show(command, environment)
            return Outcome(status == 0, machine, summary)


def show(command: tuple[str, ...], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command and let what it says be seen; its exit status, and the last line."""
    last = ""
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **both) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def run_aarch64(name: str, options: list[str]) -> Outcome:
    """The kernels alone, cross-compiled, under an emulator."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        raise Impossible("it needs g++-aarch64-linux-gnu and qemu-user")
    with tempfile.TemporaryDirectory() as folder:
        for level in ("armv8-a", "armv8.2-a+dotprod"):
            try:
                program = compile_check(compiler, Path(folder, level), "-static", f"-march={level}")
            except subprocess.CalledProcessError as error:
                return Outcome(False, "aarch64", str(error))
            status, summary = show((emulator, str(program)))
            if status:
                break
    return Outcome(status == 0, "aarch64, emulated", summary)


PROFILES: dict[str, Callable[[str, list[str]], Outcome]] = {
    "avx2": Profile(
        "AVX2, native kernels",
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "RADIXCACHE_MARCH": "x86-64-v3",
        },
    ).run,
    "no-compiler": Profile("no C++ compiler", hides_programs=True).run,
    "aarch64": run_aarch64,
    "one-thread": Profile("1 thread,", {"OMP_NUM_THREADS": "1"}).run,
    "three-threads": Profile("3 threads,", {"TEST_THREADS": "3"}).run,
    "lowest": Profile("Python 3.10", version="3.10", versions="lowest").run,
    "newest": Profile("newest versions", version=f"3.14 {RUNNING}", versions="newest").run,
    "python3.13": Profile("Python 3.13", version="3.13").run,
}


# Environments.


def make_environment(folder: Path, version: str, versions: str) -> str:
    """The interpreter of an environment with what the tests import; the project stays outside."""
    needed, pins = requirements("dependencies|runtime")
    testing = TESTING
    python = folder / "bin" / "python"
    text = (ROOT / "constraints.txt").read_text()
    if versions == "lowest":  # constraints.txt has higher ones, and of torch's own needs too
        text = "\n".join(pins)
    if versions == "newest":  # whatever that is today: remove the folder to have it made again
        needed, _ = requirements("dependencies|runtime|server|otel|dev")
        testing = []
        text = next(line for line in text.splitlines() if line.startswith("torch=="))
    stamp = folder / "constraints.txt"
    wanted = "\n".join([text, *(f"# {name}" for name in (*needed, *testing))])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {folder.relative_to(ROOT)} ...", flush=True)
        subprocess.run((find_python(version), "-m", "venv", "--clear", folder), check=True)
        torch = next(pin for pin in text.splitlines() if pin.startswith("torch=="))
        part = folder / "part.txt"
        part.write_text(text)
        pip = (python, "-m", "pip", "install", "--quiet")
        # A CPU build, where pip knows one, is a tenth of the size.
        if subprocess.run((*pip, f"{torch}+cpu"), capture_output=True).returncode:
            print(f"pip finds no {torch}+cpu: the build for GPUs takes 5 GB", flush=True)
        done = subprocess.run((*pip, "-c", part, *needed, *testing), capture_output=True, text=True)
        if done.returncode:
            raise Impossible(f"pip: {done.stderr.strip().rpartition(chr(10))[2]}")
        stamp.write_text(wanted)
    return str(python)


def requirements(names: str) -> tuple[list[str], list[str]]:
    """What is in such lists of pyproject.toml, by name, and the lowest versions of that."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(rf"^(?:{names}) = \[(.*?)\](?:  #.*)?$", text, re.DOTALL | re.MULTILINE)
    lowest = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', "".join(lists))
    return [name for name, _ in lowest], [f"{name}=={version}" for name, version in lowest]


def find_python(versions: str) -> str:
    """An interpreter of the first of these versions that is here: of the system, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in versions.split():
        found = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
        for python in map(str, filter(None, found)):
            said = subprocess.run((python, "-V"), capture_output=True, text=True).stdout
            if said.startswith(f"Python {version}."):
                return python
    raise Impossible(f"there is no Python {' or '.join(versions.split())}")


# The command.


def main() -> int:
    arguments = [*sys.argv[1:], "--"]
    own, options = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 : -1]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", nargs="*", metavar="profile", help=", ".join(PROFILES))
    names = parser.parse_args(own).profiles or list(PROFILES)
    if unknown := [name for name in names if name not in PROFILES]:
        parser.error(f"no profile {', '.join(unknown)}; there are {', '.join(PROFILES)}")
    rows, failed = [], False
    for name in names:
        print(f"\n{name}", flush=True)
        start = time.monotonic()
        try:
            outcome = PROFILES[name](name, options)
        except Impossible as reason:
            rows.append(f"| {name} | not run: {reason} | | |")
            continue
        seconds = time.monotonic() - start
        rows.append(f"| {name} | {outcome.machine} | {outcome.summary} | {seconds:.0f} |")
        failed |= not outcome.passed
    print(f"\n{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores\n")
    print("| profile | machine | what came of it | seconds |\n|---|---|---|---|")
    print(*rows, sep="\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
