"""Reads a worker's news of jobs, on the caller's thread or on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from radixcache.errors import EngineStopped
from radixcache.runtime.engine.worker import Job, News, Worker
from radixcache.runtime.request import Request

Add = Callable[[], list[Request]]
"""Adds a job's requests to the engine, on its thread."""


def listen(worker: Worker, job: Job, add: Add) -> Generator[Any, None, None]:
    """Submit a job and iterate over its news; closing the iterator early aborts the job.

    Raises:
        Exception: what `add` raises, at once, or what ends the job.
    """
    inbox: SimpleQueue[list[News]] = SimpleQueue()
    submitted = worker.submit(job, add, inbox.put)

    def read() -> Generator[Any, None, None]:
        try:
            submitted.result()
            yield None
            while True:
                for news in inbox.get():
                    yield from news.items
                    if news.error is not None:
                        raise news.error
                    if news.finished:
                        return
        finally:  # without waiting: garbage collection may run this while others hold locks
            worker.abort(job)

    reading = read()
    next(reading)  # closing a generator that has not begun would abort nothing
    return reading


async def listen_async(worker: Worker, job: AsyncJob, add: Add) -> AsyncGenerator[Any, None]:
    """Do what `listen` does, on the running event loop."""
    try:
        await asyncio.wrap_future(worker.submit(job, add, deliver_to(asyncio.get_running_loop())))
        async for items in job.batches():
            for item in items:
                yield item
    finally:
        aborted = asyncio.wrap_future(worker.abort(job))
        with suppress(EngineStopped):
            await asyncio.shield(aborted)  # a task that is cancelled twice aborts nevertheless


class AsyncJob(Job):
    """A job that belongs to an event loop; the engine's thread only feeds it.

    Attributes:
        done: no more news will come.
        error: why, if the requests did not end by themselves.
    """

    def __init__(self, stream: bool) -> None:
        super().__init__(stream)
        self.done = False
        self.error: Exception | None = None
        self._items: list[Any] = []
        self._wake = asyncio.Event()

    async def batches(self, silence: float | None = None) -> AsyncIterator[list[Any]]:
        """Iterate over the news since the last look; a slow reader gets more at once.

        Args:
            silence: seconds without news after which there is an empty batch.

        Raises:
            Exception: `error`.
        """
        loop = asyncio.get_running_loop()
        while True:
            if silence is not None:
                alarm = loop.call_later(silence, self._wake.set)
            await self._wake.wait()
            self._wake.clear()
            items, self._items = self._items, []
            if silence is not None:
                alarm.cancel()
            if items or (silence is not None and alarm.when() <= loop.time() and not self.done):
                yield items
            if self.error is not None:
                raise self.error
            if self.done:
                return

    def end(self, error: Exception | None = None) -> None:
        """End the news; a second call does nothing."""
        if not self.done:
            self.done = True
            self.error = error
            self._wake.set()

    def receive(self, news: News) -> None:
        """Take the news of a step."""
        if not self.done:
            self._items += news.items
            self._wake.set()
            if news.finished:
                self.end(news.error)


def deliver_to(loop: asyncio.AbstractEventLoop) -> Callable[[list[News]], None]:
    """A function that hands a step's news to the jobs of `loop`, in one call of it."""

    def deliver(news: list[News]) -> None:
        for one in news:
            assert isinstance(one.job, AsyncJob)
            one.job.receive(one)

    def tell(news: list[News]) -> None:
        with suppress(RuntimeError):  # the loop is closed: its tasks have ended
            loop.call_soon_threadsafe(deliver, news)

    return tell
