"""A library in a process and an environment of its own, spoken with in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent


def python_of(venv: str) -> Path:
    """The interpreter of an environment in the repository; of ".venv", the one that runs this."""
    return Path(sys.executable) if venv == ".venv" else ROOT / venv / "bin" / "python"


class Worker:
    """A module that says a line when it is ready, then answers a line for each line.

    Args:
        venv: environment in which it runs.
        made_by: make target that makes the environment.
        command: the module, and its arguments.
        environment: variables beside ours.
    """

    def __init__(self, venv: str, made_by: str, *command: str, **environment: str) -> None:
        self.error = ""
        self.version = ""
        self.process: subprocess.Popen[str] | None = None
        python = python_of(venv)
        if not python.exists():
            self.error = f"{venv} does not exist: `make {made_by}` makes it"
            return
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (the process outlives this call)
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        answer = self._read()
        self.version = answer.get("version", "")
        self.error = answer.get("error", "")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the worker answers to a request; {"error": ...} if it has ended."""
        assert self.process is not None and self.process.stdin is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self._ended()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else self._ended()
        return answer

    def _ended(self) -> dict[str, Any]:
        self.log.seek(0)
        last = self.log.read().strip().rpartition("\n")[2]
        return {"error": f"its process ended: {last}"}

    def close(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()


def serve(
    load: Callable[[], tuple[Any, str]], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> NoReturn:
    """The worker's side: load a library, say its version, then answer a line for each line."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is not an answer

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
    os._exit(0)  # whatever threads a library has
