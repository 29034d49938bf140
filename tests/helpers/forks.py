"""Processes that need not import: copies of the tests' own, taken before any thread runs in it.

What imports torch and transformers takes 6 seconds of processor time to start. A *nursery*, forked
when all tests are imported and none has run, forks them off itself in no time.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

_nursery: tuple[int, Connection] | None = None
_asking = RLock()


def open_nursery() -> None:
    """To be called once, before there are threads; it ends with this process at the latest."""
    global _nursery
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # xdist's thread waits for its messages
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when the tests do
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    _nursery = pid, ours


def close_nursery() -> None:
    global _nursery
    if _nursery is not None:
        (pid, ours), _nursery = _nursery, None
        ours.close()
        os.waitpid(pid, 0)


class Forked:
    """A process that calls `function` of a module with `arguments`, and ends with what it returns.

    What it prints goes to the files `out` and `err` in `folder`.
    """

    def __init__(self, folder: Path, function: Callable[..., int], *arguments: Any) -> None:
        self.out, self.err = folder / "out", folder / "err"
        self.pid: int = _ask(self.out, self.err, function, arguments)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it, or None: it runs."""
        with _asking:  # a process ends once
            if self.returncode is None:
                self.returncode = _ask(self.pid)
            return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            assert time.monotonic() < end, "it still runs"
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait(30)


def radixcache(*arguments: str) -> int:
    """What `python -m radixcache` does."""
    sys.argv = ["radixcache", *arguments]
    try:
        runpy.run_module("radixcache", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("it does not end with a status")


def _ask(*request: Any) -> Any:
    assert _nursery is not None, "tests/conftest.py opens it"
    _, ours = _nursery
    with _asking:
        ours.send(request)
        return ours.recv()


def _serve(requests: Connection) -> None:
    """Fork, or tell of a child's end, until the tests' process has ended."""
    running = set()
    while True:
        try:
            request = requests.recv()
        except (EOFError, OSError):
            break
        if len(request) == 1:
            pid, status = os.waitpid(request[0], os.WNOHANG)
            running.discard(pid)
            requests.send(os.waitstatus_to_exitcode(status) if pid else None)
        else:
            pid = os.fork()
            if pid == 0:
                requests.close()
                _call(*request)
            running.add(pid)
            requests.send(pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _call(
    out: Path, err: Path, function: Callable[..., int], arguments: tuple[Any, ...]
) -> NoReturn:
    status = 1
    try:
        for number, path in enumerate((Path(os.devnull), out, err)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, m) for n, m in enumerate("rww"))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = function(*arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
