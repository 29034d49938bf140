"""The processes that compute one model, each a rank; rank 0 starts, directs and ends the others.

Rank 0 is the process that loads the model; no launcher is needed. Its messages go through the
others' standard input, so that its death, of whatever kind, ends that file, and them.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, RLock, Thread
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore, distributed_c10d  # type: ignore[attr-defined]

from radixcache.errors import EngineStopped, InvalidRequest, RanksLost, first_sentence

_log = logging.getLogger("radixcache")

Follow = Callable[[int, Callable[[], Any]], None]
"""The function that another rank runs: it gets its rank, and a function for the next message."""

_MEETING = timedelta(minutes=1)  # once all have come
_WORK = timedelta(hours=2)  # as transformers': reading a large model takes long

_QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # rank 0 says the same


class Ranks:
    """Ranks 1 to `count` - 1, seen from rank 0.

    Attributes:
        lost: why nothing can be computed any more; None while all ranks run.
        loaded: whether the model is loaded: losses are logged from then on; before, loading raises.
    """

    def __init__(self, count: int, follow: Follow) -> None:
        """Start the other ranks; `follow` is defined at the top level of its module.

        Raises:
            InvalidRequest: this process is one of several already.
            RanksLost: the system starts no more processes.
        """
        if dist.is_initialized():
            raise InvalidRequest(
                "this process is in a torch.distributed group already: there can be one "
                "tensor-parallel model at a time, and none under torchrun"
            )
        self.lost: str | None = None
        self.loaded = self._closed = self._left = False
        self._lock, self._gone, self._home = RLock(), Event(), os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        path = [folder for folder in sys.path if isinstance(folder, str)]  # as imports do
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import worker_main; "
        code += f"from {follow.__module__} import {follow.__name__} as follow; worker_main(follow, "
        for rank in range(1, count):
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"{code}{rank}, {self._home})"],
                    stdin=subprocess.PIPE,
                    stdout=2,
                    env={**os.environ, **_QUIET, **_variables(rank)},
                    start_new_session=True,  # Ctrl-C is rank 0's
                )
            except OSError as error:
                self._lose(f"the process of rank {rank} does not start ({first_sentence(error)})")
                raise RanksLost(self.lost) from None
            self._processes.append(process)
            Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Send each rank a message, which is pickled."""
        sent = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for process in self._processes:
            pipe = cast(IO[bytes], process.stdin)
            pipe.write(sent)
            pipe.flush()

    @contextmanager
    def broadcast(self, *message: Any) -> Iterator[None]:
        """Send a message, and compute the same inside; any error puts the ranks out of step.

        Raises:
            RanksLost: now or before.
            EngineStopped: `stop` was called.
        """
        cause: BaseException | None = None
        if self.lost is None:
            try:
                self.tell(*message)
                yield
            except BaseException as error:
                cause = error
                if not self.has_lost_one():
                    self._lose(f"rank 0 has failed ({first_sentence(error)})")
        if self._closed:
            raise EngineStopped("the model is closed") from cause
        if self.lost is not None:
            raise RanksLost(self.lost) from cause

    def has_lost_one(self) -> bool:
        """Whether another rank has ended, or ends within half a second, which explains an error."""
        return self._gone.wait(0.5)

    def stop(self) -> None:
        """End the other ranks: a step under way fails, even if it waits for one that hangs.

        This and `close` may be called again, from any thread; in a fork of this process, which
        does not own the ranks, they do nothing.
        """
        if os.getpid() == self._home:
            self._closed = True
            self._lose("the model is closed")

    def close(self) -> None:
        """End the other ranks, and leave the group, once nothing is computed."""
        self.stop()
        with self._lock:
            left, self._left = self._left, True
        if not left and os.getpid() == self._home and dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._lose(f"the process of rank {rank} has ended (status {status})")

    def _lose(self, reason: str) -> None:
        """End all ranks: none may wait for ever for a lost one in a collective."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = f"{reason}: without all its ranks, the model computes nothing more"
            self._gone.set()
        if self.loaded and not self._closed:
            _log.critical("%s", self.lost)
        for process in self._processes:
            process.kill()
            process.wait()
            with suppress(OSError):  # what is left to be sent
                cast(IO[bytes], process.stdin).close()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # NCCL waits for the dead


def worker_main(follow: Follow, rank: int, parent: int) -> None:
    """Run `follow` as another rank, until rank 0 ends or closes the file, or `follow` fails."""
    messages: SimpleQueue[Any] = SimpleQueue()

    def listen() -> None:
        with suppress(Exception):  # the end, or cut off in the middle of a message
            while True:
                messages.put(pickle.load(sys.stdin.buffer))
        os._exit(0)

    def look() -> None:  # a fork of rank 0 may keep the file open
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    for watch in (listen, look):
        Thread(target=watch, daemon=True).start()
    try:
        follow(rank, messages.get)
    except BaseException as error:
        time.sleep(1)  # if another has failed, rank 0 says so, and ends this one
        print(f"radixcache: rank {rank} ends: {first_sentence(error)}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def as_rank_0() -> Iterator[None]:
    """Make this process's environment that of rank 0, until the model is loaded."""
    before = {name: os.environ.get(name) for name in _variables(0)}
    os.environ.update(_variables(0))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _variables(rank: int) -> dict[str, str]:
    """Variables by which transformers chooses a GPU, and gloo its address."""
    return {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}


def join(
    rank: int, count: int, meeting: str, device: torch.device, ranks: Ranks | None = None
) -> None:
    """Make this process one of `count`, which meet by a new file; returns once all have come.

    Raises:
        RanksLost: one of `ranks`, given on rank 0, ended before it came.
    """
    store = FileStore(meeting, count)
    store.add("here", 1)
    while ranks is not None and store.add("here", 0) < count:
        if ranks.lost is not None:
            raise RanksLost(ranks.lost)
        time.sleep(0.01)
    # It names groups by their number, and counts one that has failed: the others would wait for it.
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=rank,
        world_size=count,
        timeout=_MEETING,  # one that ends now, after it came, is not seen otherwise
        device_id=None if device.type == "cpu" else device,
    )
    distributed_c10d._set_pg_timeout(_WORK)
