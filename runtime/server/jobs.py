"""Tracks the jobs of clients on the event loop, while the engine runs on a thread of its own.

The engine's thread passes each step's results to the loop in one call, however many clients wait
(see `radixcache.runtime.engine.worker`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from radixcache.errors import EngineStopped
from radixcache.runtime.engine.stream import Stream
from radixcache.runtime.engine.worker import Worker
from radixcache.runtime.outputs import Delta, RequestOutput
from radixcache.runtime.request import Request
from radixcache.runtime.server.http.errors import ApiError, as_api_error
from radixcache.runtime.server.observe.metrics import Metrics
from radixcache.runtime.server.observe.request_log import jobs_of_task

if TYPE_CHECKING:  # needs packages that most servers do without
    from radixcache.runtime.server.observe.tracing import Tracing

T = TypeVar("T")

SLOW_SHARE = 0.2
"""Share of the engine thread's time for reads of the whole cache, even if a client polls it."""


class PromptDelta(NamedTuple):
    """A delta, and the index of the job's prompt that it answers."""

    prompt: int
    delta: Delta


class Prefilled(NamedTuple):
    """Tokens of the job's prompts that are computed or were cached, before the first token."""

    tokens: int


class Job(Stream):
    """The requests of one client, on the running event loop.

    Attributes:
        on_end: called when the news end.
    """

    def __init__(self, metrics: Metrics, stream: bool) -> None:
        super().__init__(stream, asyncio.get_running_loop())
        self._metrics = metrics
        self._prefilled = 0
        self.on_end: list[Callable[[], object]] = []

    # -- on the engine's thread ----------------------------------------------------------------

    def report(self, request: Request) -> list[PromptDelta]:
        self._metrics.note_token(request, time.perf_counter())
        if not self.every_token:
            return []
        prompt = self.requests.index(request)
        return [
            PromptDelta(prompt, sequence.take_delta())
            for sequence in request.sequences
            if sequence.has_delta
        ]

    def report_prefill(self) -> list[Prefilled]:
        before = self._prefilled
        self._prefilled = sum(max(s.num_computed for s in r.sequences) for r in self.requests)
        return [Prefilled(self._prefilled)] if self._prefilled != before else []

    def note_end(self, request: Request) -> None:
        self._metrics.note_end(request)

    # -- on the event loop ---------------------------------------------------------------------

    async def finished(self) -> list[RequestOutput]:
        """The outputs once all are finished.

        Raises:
            ApiError: a request failed, took too long, or the server is shutting down.
        """
        async for _ in self.batches():
            pass
        return self.outputs()

    def put(self, news: Iterable[PromptDelta | Prefilled]) -> None:
        super().put(news)
        failed = next((r for r in self.requests if r.error is not None), None)
        if failed is not None:
            self.end(ApiError(400 if failed.error_is_invalid else 500, str(failed.error)))

    def end(self, error: Exception | None = None) -> None:
        if not self.done:
            super().end(error and as_api_error(error))
            for function in self.on_end:
                function()


class RequestTracker:
    """Takes jobs within limits, on an event loop, and ends them.

    Args:
        worker: runs the engine on its thread.
        metrics: records every token.
        tracing: records every job that has ended.
        capacity: most sequences that may run or wait.
        share: most of one client.
    """

    def __init__(
        self, worker: Worker, metrics: Metrics, tracing: Tracing | None, capacity: int, share: int
    ) -> None:
        self.worker = worker
        self.capacity = capacity
        self.share = share
        self.draining = False
        self._metrics = metrics
        self._tracing = tracing
        self._open: set[Job] = set()
        self._num_sequences: Counter[Hashable] = Counter()
        """Sequences that run or wait, by client."""
        self._drained = asyncio.Event()
        self._slow_lock = asyncio.Lock()
        self._next_slow = 0.0

    @property
    def alive(self) -> bool:
        return self.worker.alive

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, run on the engine's thread between two steps.

        Raises:
            EngineStopped: the engine has stopped.
            Exception: what `function` raises.
        """
        return await asyncio.wrap_future(self.worker.call(function))

    async def call_slow(self, function: Callable[[], T]) -> T:
        """Like `call`, for slow reads: one at a time, for at most `SLOW_SHARE` of the time."""

        def timed() -> T:
            start = time.perf_counter()
            try:
                return function()
            finally:
                end = time.perf_counter()
                self._next_slow = end + (end - start) * (1 / SLOW_SHARE - 1)

        async with self._slow_lock:
            await asyncio.sleep(self._next_slow - time.perf_counter())
            return await self.call(timed)

    def check_room(self, num_sequences: int, client: Hashable) -> None:
        """Raise `ApiError` if there is no room for so many completions; call it before any work."""
        if self.draining:
            raise ApiError(503, "the server is shutting down")
        if num_sequences > self.share:
            raise ApiError(
                400, f"{num_sequences} completions at once; the server takes {self.share} at most"
            )
        if self._num_sequences.total() + num_sequences > self.capacity:
            raise ApiError(429, "too many completions are running or waiting; try again")
        if self._num_sequences[client] + num_sequences > self.share:
            raise ApiError(429, "too many completions of this client are running or waiting")

    @contextmanager
    def room(self, num_sequences: int, client: Hashable) -> Iterator[None]:
        """Hold room for so many completions of several jobs, which are submitted with 0, one after
        another; raises as `check_room`."""
        self.check_room(num_sequences, client)
        self._note(client, num_sequences)
        try:
            yield
        finally:
            self._note(client, -num_sequences)

    def _note(self, client: Hashable, change: int) -> None:
        self._num_sequences[client] += change
        self._num_sequences = +self._num_sequences  # drops clients without sequences

    async def submit(
        self,
        add: Callable[[], list[Request]],
        num_sequences: int,
        *,
        client: Hashable,
        timeout: float,
        stream: bool = False,
    ) -> Job:
        """Queue requests; the caller must read the job to its end, or call its `end`.

        Args:
            add: adds the requests to the engine, on its thread.
            num_sequences: completions of all the requests.
            stream: the caller reads `Job.batches`, not `Job.finished`.
            timeout: seconds until the job ends with an error.

        Raises:
            ApiError: the server is full, the client has its share, or the server is shutting down.
            Exception: what `add` raises.
        """
        self.check_room(num_sequences, client)
        job = Job(self._metrics, stream)
        self._take(job, num_sequences, client, timeout)
        jobs_of_task.get([]).append(job)
        try:
            await asyncio.wrap_future(self.worker.submit(job, add))
        except BaseException:
            job.end()
            raise
        return job

    def _take(self, job: Job, num_sequences: int, client: Hashable, timeout: float) -> None:
        self._open.add(job)
        self._note(client, num_sequences)

        def close() -> None:
            self._open.remove(job)
            self._note(client, -num_sequences)
            self.worker.abort(job)
            if not self._open:
                self._drained.set()

        job.on_end.append(close)
        if self._tracing is not None:
            record = self._tracing.follow()
            job.on_end.append(lambda: record(job.requests, job.error))
        error = ApiError(504, f"not finished within {timeout:g} seconds")
        alarm = asyncio.get_running_loop().call_later(timeout, job.end, error)
        job.on_end.append(alarm.cancel)

    async def drain(self, grace: float) -> None:
        """Refuse new jobs, and fail those that still run after `grace` seconds."""
        self.draining = True
        self._drained.clear()
        if self._open:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace)
        for job in [*self._open]:
            job.end(ApiError(503, "the server is shutting down"))

    async def close(self) -> None:
        await self.drain(0)
        with suppress(EngineStopped):
            await self.call(lambda: None)  # answered once all requests are aborted
