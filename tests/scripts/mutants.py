"""Breaks one rule of the package at a time, in one line, and sees that the tests notice.

    python -m tests.scripts.mutants         # all of them
    python -m tests.scripts.mutants salt    # those with this word in their names

Each mutant of `mutants.yaml` is a copy of the project with one change; the tests that it stands
under must fail on it. On the project as it is they pass, which `make test` shows. Those named
"gpu: ..." need what `make test-gpu` brings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("radixcache", "runtime", "kernels", "bench", "release", "tests", "examples", "docs")
FILES = ("pyproject.toml", "README.md", "Makefile")


class Mutant(NamedTuple):
    """One line less of the truth: in `path`, `old` (once there) becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    tests: str


TABLE = Path(__file__).with_suffix(".yaml").read_text()
MUTANTS = [
    Mutant(name, path, old, new, tests)
    for path, groups in yaml.safe_load(TABLE).items()
    for tests, faults in groups.items()
    for name, (old, new) in faults.items()
]


def survives(mutant: Mutant) -> bool:
    """Whether the tests pass on it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignored)
        for file in FILES:
            shutil.copy(ROOT / file, copy / file)
        path = copy / mutant.path
        path.write_text(changed(path.read_text(), mutant))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=copy,
            env=environment(mutant),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1) or (not done.returncode and " passed" not in done.stdout):
        raise SystemExit(f"{mutant.name}: the tests did not run\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def environment(mutant: Mutant) -> dict[str, str]:
    """With FlashInfer, or Triton's interpreter, for the tests that skip without."""
    if not mutant.name.startswith("gpu:"):
        return dict(os.environ)
    interprets = "triton" in mutant.tests
    found = [ROOT / ".venv-gpu" / name for name in ["triton"] * interprets + ["flashinfer"]]
    if not found[0].exists():
        raise SystemExit(f"{mutant.name}: `make .venv-gpu/.stamp` brings what its tests need")
    path = ":".join(map(str, found))
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": str(int(interprets))}


def changed(text: str, mutant: Mutant) -> str:
    """The text of the mutant's file."""
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places"
    return text.replace(mutant.old, mutant.new)


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in m.name for word in words)]
    survivors = 0
    for mutant in chosen:
        start = time.monotonic()
        lives = survives(mutant)
        survivors += lives
        verdict = "SURVIVES" if lives else "killed"
        print(f"{verdict:8} {time.monotonic() - start:5.0f} s  {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
