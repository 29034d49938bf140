"""The engine in a thread of its own, and asyncio outside.

Everything that touches the engine, its cache or its named prefixes runs on one thread. It takes
functions from a queue between steps, and blocks on that queue when there is nothing to compute: an
idle server does nothing at all. What a step has brought goes to the event loop in one call, however
many clients wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from radixcache.runtime.engine.outputs import Delta, RequestOutput
from radixcache.runtime.engine.request import Request
from radixcache.runtime.llm import LLM
from radixcache.runtime.server.errors import ApiError
from radixcache.runtime.server.metrics import Metrics

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 2
"""Steps in a row that may fail before their requests do."""


class PromptDelta(NamedTuple):
    """A delta, and which of the job's prompts it answers."""

    prompt: int
    delta: Delta


class Job:
    """The requests of one client. Belongs to the event loop; the engine's thread only feeds it.

    Attributes:
        requests: one for each prompt. Their prompts never change, and what is finished is final;
            anything else is the engine thread's.
    """

    def __init__(self, stream: bool, num_sequences: int) -> None:
        self.stream = stream
        self.num_sequences = num_sequences
        self.requests: list[Request] = []
        self.done = False
        self._deltas: list[PromptDelta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._on_end: list[Callable[[], object]] = []

    async def deltas(self) -> AsyncIterator[list[PromptDelta]]:
        """What was generated since the last look, until all is; a slow reader gets more at once.

        Raises:
            ApiError: a request failed, took too long, or the server is shutting down.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas = self._deltas, []
            if deltas:
                yield deltas
            if self._error is not None:
                raise self._error
            if self.done:
                return

    async def outputs(self) -> list[RequestOutput]:
        """The outputs in the order of the prompts, once all are finished; errors as above."""
        while not self.done:
            await self._news.wait()
            self._news.clear()
        if self._error is not None:
            raise self._error
        return [request.output() for request in self.requests]

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes. What is unfinished is aborted. Does nothing the second time."""
        if not self.done:
            self.done = True
            self._error = error
            self._news.set()
            for function in self._on_end:
                function()

    def _feed(self, deltas: list[PromptDelta]) -> None:
        if not self.done:
            self._deltas += deltas
            self._news.set()


class _Entry(NamedTuple):
    """What the engine's thread keeps of a request."""

    job: Job
    prompt: int


class _Update(NamedTuple):
    """What a step brought for a job."""

    job: Job
    deltas: list[PromptDelta]
    finished: bool
    error: Exception | None


class Worker:
    """Runs an LLM's engine.

    Args:
        llm: from `start` to `close`, only functions given to `call` and `submit` may use it.
        metrics: told of every token.
        max_queued: sequences that may wait, besides those that run.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_queued: int) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._metrics = metrics
        self.capacity = llm.engine.scheduler.max_num_seqs + max_queued
        self.draining = False
        self._jobs: set[Job] = set()
        self._num_open = 0
        self._drained = asyncio.Event()
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stop = False
        # What follows is the engine thread's.
        self._entries: dict[Request, _Entry] = {}
        self._failed_steps = 0
        self.num_steps = 0
        """For who asks on the engine's thread whether anything has happened since."""

    # -- on the event loop ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine runs, and has not been told to stop."""
        return self._thread.is_alive() and not self._stop

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, run on the engine's thread between two steps.

        Raises:
            ApiError: the engine has stopped.
            Exception: what `function` raises.
        """
        future: Future[T] = Future()
        self._commands.put((future, function))
        if not self.alive:
            self._refuse_commands()
        return await asyncio.wrap_future(future)

    async def submit(
        self,
        add: Callable[[], list[Request]],
        num_sequences: int,
        *,
        stream: bool = False,
        timeout: float | None = None,
    ) -> Job:
        """Queue the requests that `add` adds to the engine, on its thread; returns their job.

        Whoever gets the job must call its `end`, or read it to its end.

        Args:
            num_sequences: completions that the requests have together.
            stream: whether `Job.deltas` will be read, else `Job.outputs`.
            timeout: seconds until the job ends with an error.

        Raises:
            ApiError: the server is full or shutting down.
            Exception: what `add` raises.
        """
        if self.draining:
            raise ApiError.unavailable("the server is shutting down")
        if num_sequences > self.capacity:
            raise ApiError.invalid(
                f"{num_sequences} completions at once; the server takes {self.capacity} at most"
            )
        if self._num_open + num_sequences > self.capacity:
            raise ApiError.busy(f"{self._num_open} completions are running or waiting; try again")
        job = Job(stream, num_sequences)
        self._open(job, timeout)
        try:
            await self.call(lambda: self._add(job, add))
        except BaseException:
            job.end()
            raise
        return job

    def _open(self, job: Job, timeout: float | None) -> None:
        self._jobs.add(job)
        self._num_open += job.num_sequences

        def close() -> None:
            self._jobs.remove(job)
            self._num_open -= job.num_sequences
            self._commands.put((Future(), lambda: self._abort(job)))
            if not self._jobs:
                self._drained.set()

        job._on_end.append(close)
        if timeout is not None:
            error = ApiError.timeout(f"not finished within {timeout:g} seconds")
            job._on_end.append(self._loop.call_later(timeout, job.end, error).cancel)

    async def drain(self, grace: float) -> None:
        """Refuse new requests, and give those that run `grace` seconds to end before they fail."""
        self.draining = True
        self._drained.clear()
        if self._jobs:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace)
        for job in [*self._jobs]:
            job.end(ApiError.unavailable("the server is shutting down"))

    async def close(self) -> None:
        """End every job and the thread, as soon as the step under way is over."""
        await self.drain(0)

        def stop() -> None:
            self._stop = True

        if self._thread.is_alive():
            self._commands.put((Future(), stop))
            await asyncio.to_thread(self._thread.join)

    def _deliver(self, updates: list[_Update]) -> None:
        for job, deltas, finished, error in updates:
            if deltas:
                job._feed(deltas)
            if finished or error:
                job.end(error)

    # -- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop:
                self._run_commands()
                if self._engine.has_work:
                    self._step()
        except BaseException:
            log.critical("the engine's thread ends", exc_info=True)
            raise
        finally:
            self._stop = True
            error = ApiError.unavailable("the engine has stopped")
            self._post([_Update(entry.job, [], True, error) for entry in self._entries.values()])
            self._refuse_commands()

    def _run_commands(self) -> None:
        """Run what is in the queue; wait for something if the engine has no work."""
        wait = not self._engine.has_work
        with suppress(queue.Empty):
            while True:
                future, function = self._commands.get(block=wait)
                wait = False
                self._llm.prefixes.drop_expired()  # so that no command sees what is over
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except Exception as error:
                        future.set_exception(error)
        self._llm.prefixes.drop_expired()

    def _refuse_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                future, _ = self._commands.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(ApiError.unavailable("the engine has stopped"))

    def _add(self, job: Job, add: Callable[[], list[Request]]) -> None:
        requests = add()
        self._entries.update((r, _Entry(job, index)) for index, r in enumerate(requests))
        job.requests = requests

    def _abort(self, job: Job) -> None:
        for request in job.requests:
            if self._entries.pop(request, None) is not None:
                self._engine.abort(request)
                self._metrics.note_end(request)

    def _step(self) -> None:
        self.num_steps += 1
        try:
            changed = self._engine.step()
        except Exception as error:
            log.exception("a step failed")
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                self._failed_steps = 0
                in_step = {sequence.request for sequence in self._engine.failed_step}
                suspects = [request for request in in_step if request in self._entries]
                self._fail(
                    suspects or [*self._entries], ApiError.internal(f"the engine failed: {error}")
                )
            return
        self._failed_steps = 0
        now = time.perf_counter()
        updates = [self._update(r, self._entries[r], now) for r in changed if r in self._entries]
        self._post([update for update in updates if update is not None])

    def _update(self, request: Request, entry: _Entry, now: float) -> _Update | None:
        """What a step has brought for a request; None if its job need not know yet."""
        job = entry.job
        self._metrics.note_token(request, now)
        error = None
        if request.finished:
            del self._entries[request]
            self._metrics.note_end(request)
            if request.error is not None:
                error = ApiError.internal(request.error)
        deltas = []
        if job.stream:
            deltas = [
                PromptDelta(entry.prompt, sequence.take_delta())
                for sequence in request.sequences
                if sequence.has_delta
            ]
        finished = not any(other in self._entries for other in job.requests)
        return _Update(job, deltas, finished, error) if deltas or finished or error else None

    def _fail(self, requests: list[Request], error: ApiError) -> None:
        """End requests, and the jobs that they are of, with an error."""
        jobs = {self._entries.pop(request).job for request in requests}
        for request in requests:
            self._engine.abort(request)
            self._metrics.note_end(request)
        self._post([_Update(job, [], True, error) for job in jobs])

    def _post(self, updates: list[_Update]) -> None:
        if updates:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver, updates)
