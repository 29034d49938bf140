"""Runs a library in its own process and environment, and talks to it in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent
STAND_INS = ROOT / "bench" / "peers" / "stand_ins"


def python_of(venv: str) -> Path:
    """The Python of an environment in the repository; ".venv" is the one that runs this."""
    return Path(sys.executable) if venv == ".venv" else ROOT / venv / "bin" / "python"


class Contender(NamedTuple):
    """A library to compare: its environment, and the class that drives it there.

    Attributes:
        options: arguments for the class, besides those of the benchmark.
        on: kinds of models that an engine is compared on.
    """

    venv: str
    module: str
    kind: str
    options: dict[str, Any] = {}  # noqa: RUF012
    on: tuple[str, ...] = ("llama",)

    def load(self) -> Any:
        """Import the class, and with it the library that it drives."""
        return getattr(import_module(self.module), self.kind)


class Failed(Exception):
    """Raised where a library cannot start, or cannot go on; the message says why."""


class Worker:
    """Starts a module that prints a line when it is ready, then answers each line with one.

    Args:
        venv: environment in which it runs.
        made_by: make target that makes the environment.
        command: the module, and its arguments.
        environment: variables beside ours.

    Raises:
        Failed: the environment does not exist, or the library cannot be loaded.
    """

    def __init__(self, venv: str, made_by: str, *command: str, **environment: str) -> None:
        python = python_of(venv)
        if not python.exists():
            raise Failed(f"{venv} does not exist: `make {made_by}` makes it")
        path = [ROOT, STAND_INS] if venv == ".venv-sglang" else [ROOT]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (the process outlives this call)
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        )
        try:
            self.version: str = self._read()["version"]
        except Failed:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer to a request. Raises `Failed` if the worker fails, or has ended."""
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            last = self.log.read().strip().rpartition("\n")[2]
            raise Failed(f"its process ended: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def serve(
    load: Callable[[], tuple[Any, str]], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> NoReturn:
    """The worker's side: load a library, print its version, then answer each line with one."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # keeps a library's own output out of the answers

    def say(attempt: Callable[[], dict[str, Any]]) -> bool:
        try:
            found = attempt()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            found = {"error": f"{type(error).__name__}: {reason}"}
        print(json.dumps(found), file=answers, flush=True)
        return "error" not in found

    library: Any = None

    def start() -> dict[str, Any]:
        nonlocal library
        library, version = load()
        return {"version": version}

    if say(start):
        for line in sys.stdin:
            say(partial(answer, library, json.loads(line)))
    os._exit(0)  # even if a library has threads left
