"""The news of requests on their way from the engine's thread to a thread or an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.request import Request


class Stream:
    """Requests that are submitted together, and their news: a thread iterates over them, or a task
    of `loop` does so asynchronously. Both raise `error` at the end.

    Args:
        every_token: the news are the requests' outputs after every token, not only their ends.

    Attributes:
        requests: prompts and finished requests never change; only the engine's thread may read
            anything else.
        done: no more news will come.
        error: why, if not all requests ended by themselves.
    """

    def __init__(
        self, every_token: bool = False, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.every_token, self.loop = every_token, loop
        self.requests: list[Request] = []
        self.done = False
        self.error: Exception | None = None
        self._news: SimpleQueue[Iterable[Any]] = SimpleQueue()
        self._wake = asyncio.Event()

    def outputs(self) -> list[RequestOutput]:
        """The requests' outputs in the order of their prompts; once all have ended."""
        return [request.output() for request in self.requests]

    # -- on the engine's thread ----------------------------------------------------------------

    def report(self, request: Request) -> Iterable[Any]:
        """The news of a request that got a token or ended."""
        return [request.output()] if self.every_token else [True] * request.finished

    def report_prefill(self) -> Iterable[Any]:
        """The news of the prompts before the first token. See `Worker.follow`."""
        return ()

    def note_end(self, request: Request) -> None:
        """Called once for each request that has ended, for any reason."""

    # -- on the loop; without one, on any thread -----------------------------------------------

    def put(self, news: Iterable[Any]) -> None:
        """Take the news of a step."""
        if not self.done:
            self._news.put(news)
            self._wake.set()

    def end(self, error: Exception | None = None) -> None:
        """End the news; a second call does nothing."""
        if not self.done:
            self.error, self.done = error, True
            self._news.put(())
            self._wake.set()

    def __iter__(self) -> Iterator[Any]:
        while not self.done or not self._news.empty():
            yield from self._news.get()
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for batch in self.batches():
            for item in batch:
                yield item

    async def batches(self, silence: float | None = None) -> AsyncIterator[list[Any]]:
        """Iterate over the news since the last look; a slow reader gets more at once.

        Args:
            silence: seconds without news after which there is an empty batch.
        """
        loop = asyncio.get_running_loop()
        while True:
            if silence is not None:
                alarm = loop.call_later(silence, self._wake.set)
            await self._wake.wait()
            self._wake.clear()
            items: list[Any] = []
            while not self._news.empty():
                items += self._news.get()
            if silence is not None:
                alarm.cancel()
            if items or (silence is not None and alarm.when() <= loop.time() and not self.done):
                yield items
            if self.error is not None:
                raise self.error
            if self.done:
                return
