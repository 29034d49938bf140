"""The processes that one model is computed by, each a rank: started, told and ended by rank 0.

Rank 0 is whoever makes the model; no launcher is needed. What it tells the others goes through
their standard input, so that its death, however it dies, is the end of that file, and theirs.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from radixcache.errors import InvalidRequest, RanksLost, first_sentence

_log = logging.getLogger("radixcache")

_LATE = 5.0
"""Seconds that a process may take to end, or to be seen to have ended."""
_QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # rank 0 says the same


class Ranks:
    """Ranks 1 to `count` - 1, seen from rank 0; each runs `follow`.

    Attributes:
        count: of all ranks.
        lost: why nothing can be computed any more; None while all is well.
    """

    def __init__(self, count: int, follow: Callable[[int, Callable[[], Any]], None]) -> None:
        """Start them, and wait until each can join.

        Args:
            follow: a function at the top of a module; gets its rank, and what to call for the next
                message.

        Raises:
            InvalidRequest: this process is one of several already.
            RanksLost: one has ended before.
        """
        if dist.is_initialized():
            raise InvalidRequest(
                "this process is in a torch.distributed group already: there can be one "
                "tensor-parallel model at a time, and none under torchrun"
            )
        self.count = count
        self.lost: str | None = None
        self._closed, self._lock = False, Lock()
        code = f"import sys; sys.path[:] = {sys.path!r}\n"
        code += f"from {__name__} import serve; from {follow.__module__} import {follow.__name__}\n"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"{code}serve({rank}, {follow.__name__})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_QUIET, "LOCAL_RANK": str(rank)},
                start_new_session=True,  # Ctrl-C is rank 0's
            )
            for rank in range(1, count)
        ]
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            with process.stdout as said:
                ready = said.readline()
            Thread(target=self._watch, args=(rank, process), daemon=True).start()
            if not ready:
                self.close()
                raise RanksLost(f"the process of rank {rank} did not start")

    def tell(self, *message: Any) -> None:
        """Send each of them a message, which is pickled."""
        sent = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(sent)
            process.stdin.flush()

    @contextmanager
    def together(self, *message: Any) -> Iterator[None]:
        """Tell them, and compute what they compute; whatever is raised puts the ranks out of step.

        Raises:
            RanksLost: now or before.
        """
        if self.lost is None:
            try:
                self.tell(*message)
                yield
            except BaseException as error:
                for process in self._processes:  # which of them, if it was not here
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LATE / 10)
                self._lose(f"rank 0 could not do its part: {first_sentence(Exception(error))}")
                if not isinstance(error, Exception):
                    raise
                raise RanksLost(self.lost) from error
        if self.lost is not None:
            raise RanksLost(self.lost)

    def close(self) -> None:
        """End them, and leave the group; may be called again, from any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._lose("the model was closed")
        if dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._lose(f"the process of rank {rank} has ended (status {status})")

    def _lose(self, reason: str) -> None:
        """End them all: who waits for one of them in a collective must not wait for ever."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = f"{reason}: without all its ranks, the model computes nothing more"
        if not self._closed:
            _log.critical("%s", self.lost)
        for process in self._processes:
            process.kill()
            process.wait(_LATE)
            assert process.stdin is not None
            with suppress(OSError):  # what is left to be sent
                process.stdin.close()
        if not self._closed and dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # NCCL waits for the dead


def serve(rank: int, follow: Callable[[int, Callable[[], Any]], None]) -> None:
    """The life of a rank above 0: follow until rank 0 ends, or says so by closing the file."""
    messages: SimpleQueue[Any] = SimpleQueue()

    def listen() -> None:
        with suppress(Exception):  # cut off in the middle of a message
            while True:
                messages.put(pickle.load(sys.stdin.buffer))
        os._exit(0)

    Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        follow(rank, messages.get)
    except BaseException as error:
        reason = first_sentence(Exception(error))
        print(f"radixcache: rank {rank} ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def meeting_place() -> Path:
    """A new file by which the ranks of this machine find each other."""
    return Path(tempfile.mkdtemp(prefix="radixcache-ranks-")) / "store"


def join(rank: int, count: int, place: Path, device: torch.device) -> None:
    """Make this process one of `count` that meet at `place`; returns when all have come."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    if backend == "gloo":  # it would listen on the address of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=FileStore(str(place), count),
        rank=rank,
        world_size=count,
        timeout=timedelta(hours=2),  # as transformers': reading a large model takes long
        device_id=None if device.type == "cpu" else device,
    )
