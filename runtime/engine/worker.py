"""Runs an engine on one thread, for callers on all others.

Everything that touches the engine, its cache or its named prefixes runs on that thread. It takes
functions from a queue between steps, and blocks on the queue when there is nothing to compute.
Requests of all callers are batched together. Each event loop hears the news of a step in one call,
however many streams its tasks read.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from ctypes import c_int32
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from radixcache.errors import EngineFailed, EngineStopped, WrongThread
from radixcache.runtime.engine.named_prefixes import NamedPrefixes
from radixcache.runtime.engine.stream import Stream
from radixcache.runtime.request import Request

T = TypeVar("T")

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.engine.engine import Engine

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 2
"""Steps in a row that may fail before their requests do."""


Add = Callable[[], list[Request]]
"""Adds a stream's requests to the engine, on its thread."""


class News(NamedTuple):
    """What a step has for a stream; the last of it if `finished`."""

    stream: Stream
    items: Iterable[Any]
    finished: bool = False
    error: Exception | None = None


class Worker:
    """Runs an engine on a thread of its own, from the first call to `close`.

    Its methods may be called from any thread. Make it in the process that uses it.

    Args:
        after_step: called on the engine's thread after each step and the calls between two.
    """

    def __init__(
        self,
        engine: Engine,
        prefixes: NamedPrefixes,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        self._engine = engine
        several = engine.multi_step
        self._interrupt = c_int32(0) if several is None else several.interrupt
        """Not 0 while commands wait: the step that runs is the last of its call."""
        self._prefixes = prefixes
        self._after_step = after_step
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._starting = threading.Lock()
        self._started = self._stop = False
        # Only the engine's thread uses the following.
        self._command: tuple[Future[Any], Callable[[], Any]] | None = None
        """The command that is running."""
        self._streams: dict[Request, Stream] = {}
        """The requests that have not ended."""
        self._followed: set[Stream] = set()
        self._discarded: list[Request] = []
        """Requests that no caller waits for, to be aborted."""
        self._failed_steps = 0
        self.num_steps = 0
        """Steps run so far."""

    # -- on any thread -------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the thread answers calls and can run steps."""
        return not self._stop

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps.

        The future raises `EngineStopped`, or what `function` raises.

        Raises:
            WrongThread: a finalizer calls this in the middle of a step on the engine's own thread.
        """
        if threading.current_thread() is self._thread:  # no other thread would run it
            if self._command is None:
                raise WrongThread("nothing can be run in the middle of a step")
            future: Future[T] = Future()
            answer(future, function)
            return future
        return self._queue(function)

    def _queue(self, function: Callable[[], T]) -> Future[T]:
        """Queue `function`; takes no lock once the thread runs, so finalizers may call it."""
        future: Future[T] = Future()
        self._commands.put((future, function))
        self._interrupt.value = 1
        if not self._started:
            with self._starting:
                if self._thread.ident is None and not self._stop:
                    self._thread.start()
                self._started = True
        if self._stop or not self._thread.is_alive():  # or this process was forked off its own
            self._refuse_commands()
        return future

    def submit(self, stream: Stream, add: Add) -> Future[None]:
        """Queue the requests that `add` adds to the engine; their news go to the stream.

        The future raises what `call`'s raises. The submitter calls `abort` to leave early.

        Raises:
            WrongThread: on the engine's thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise WrongThread("the engine's own thread cannot wait for an answer of the engine")

        def run() -> None:
            stream.requests = add()
            self._streams.update(dict.fromkeys(stream.requests, stream))
            if not stream.requests:
                self._tell([News(stream, (), True)])

        return self.call(run)

    def read(self, stream: Stream, add: Add) -> Generator[Any, None, None]:
        """Submit a stream and iterate over it; closing the iterator early aborts its requests.

        Raises:
            Exception: what `add` raises, at once, or what ends the stream.
        """
        submitted = self.submit(stream, add)

        def read() -> Generator[Any, None, None]:
            try:
                submitted.result()
                yield None
                yield from stream
            finally:  # without waiting: garbage collection may run this while others hold locks
                self.abort(stream)

        reading = read()
        next(reading)  # closing a generator that has not begun would abort nothing
        return reading

    async def read_async(self, stream: Stream, add: Add) -> AsyncGenerator[Any, None]:
        """Do what `read` does, on the stream's event loop."""
        try:
            await asyncio.wrap_future(self.submit(stream, add))
            async for item in stream:
                yield item
        finally:
            aborted = asyncio.wrap_future(self.abort(stream))
            with suppress(EngineStopped):
                await asyncio.shield(aborted)  # a task that is cancelled twice aborts nevertheless

    def follow(self, stream: Stream) -> None:
        """Report a stream's prefill now and after each step, until it has a token."""

        def run() -> None:
            self._followed.add(stream)
            self._tell(self._prefilled())

        self._queue(run)

    def abort(self, stream: Stream) -> Future[None]:
        """Abort the unfinished requests of a stream after the current step.

        A finalizer may call this, in the middle of a step, too: it must not wait for the future.
        """
        return self._queue(lambda: self.discard([r for r in stream.requests if r in self._streams]))

    def close(self) -> None:
        """End the thread after the current step, and every stream with an error."""
        with self._starting:
            started = self._thread.ident is not None
            self._stop = self._stop or not started

        def stop() -> None:
            self._stop = True

        if threading.current_thread() is self._thread:
            stop()
        elif started:
            self.call(stop)
            self._thread.join()

    # -- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._engine.model.threads():
                while not self._stop:
                    self._turn()
        except BaseException:
            log.critical("the engine's thread ends", exc_info=True)
            raise
        finally:
            self._stop = True
            stopped = EngineStopped("the engine has stopped")
            try:
                self._answer_with(stopped)
                self._tell([News(s, (), True, stopped) for s in {*self._streams.values()}])
            finally:
                self._engine.scheduler.admission.images.close()
                self._refuse_commands()

    def _turn(self) -> None:
        """Run the queued commands, and a step if there is work."""
        try:
            self._run_commands()
            self._abort_discarded()
            if self._engine.has_work and not self._stop:
                self._step()
            if self._after_step is not None:
                self._after_step()
        except Exception as error:  # news may be lost: say so
            log.exception("the engine's thread failed")
            self._answer_with(error)
            self._fail([*self._streams], error)

    def _run_commands(self) -> None:
        """Run the queued commands; wait for one if the engine has no work."""
        wait = not self._engine.has_work
        self._interrupt.value = 0
        with suppress(queue.Empty):
            while True:
                self._command = future, function = self._commands.get(block=wait)
                wait = False
                self._prefixes.drop_expired()  # so that no command sees an expired one
                answer(future, function)
                if self._engine.cache.broken:
                    self._engine.recover()
                self._command = None
                del future, function  # while this waits for more, they may hold much alive
        self._prefixes.drop_expired()

    def _answer_with(self, error: Exception) -> None:
        """End the command that is running, if there is one, with an error."""
        if self._command is not None and not self._command[0].done():
            self._command[0].set_exception(error)
        self._command = None

    def _refuse_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                future, _ = self._commands.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStopped("the engine has stopped"))

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
                suspects = [request for request in self._streams if request in in_step]
                self._fail(suspects or [*self._streams], error)
            changed = [request for request in self._streams if request.finished]  # in it, or before
        else:
            self._failed_steps = 0
        changed = [request for request in changed if request in self._streams]
        items: dict[Stream, list[Any]] = {}
        for request in changed:
            stream = self._streams[request]
            items.setdefault(stream, []).extend(stream.report(request))
            if request.finished:
                stream.note_end(request)
        news = self._prefilled()
        for stream, reported in items.items():
            finished = all(request.finished for request in stream.requests)
            if reported or finished:
                news.append(News(stream, reported, finished))
        self._tell(news)
        for request in changed:
            if request.finished:
                del self._streams[request]

    def _prefilled(self) -> list[News]:
        """The prefill news of followed streams."""
        for stream in [*self._followed]:
            if any(r.first_token is not None or r not in self._streams for r in stream.requests):
                self._followed.remove(stream)
        progress = [(stream, stream.report_prefill()) for stream in self._followed]
        return [News(stream, items) for stream, items in progress if items]

    def _fail(self, requests: list[Request], error: Exception) -> None:
        """End the streams of these requests with an error."""
        failure = EngineFailed(f"the engine failed: {error}")
        failure.__cause__ = error
        streams = dict.fromkeys(self._streams[request] for request in requests)
        try:
            self.discard([r for r, stream in self._streams.items() if stream in streams])
        finally:
            self._tell([News(stream, (), True, failure) for stream in streams])

    def discard(self, requests: list[Request]) -> None:
        """Abort requests, on the engine's thread; what fails is tried again before a step."""
        for request in requests:
            stream = self._streams.pop(request, None)
            if stream is not None:
                stream.note_end(request)
            self._discarded.append(request)
        self._abort_discarded()

    def _abort_discarded(self) -> None:
        try:
            while self._discarded:
                self._engine.abort(self._discarded[-1])
                self._discarded.pop()
        except Exception:
            log.exception("an abort failed")

    def _tell(self, news: list[News]) -> None:
        of_loops: defaultdict[asyncio.AbstractEventLoop | None, list[News]] = defaultdict(list)
        for one in news:
            of_loops[one.stream.loop].append(one)
        of_threads = of_loops.pop(None, [])
        for loop, heard in of_loops.items():
            with suppress(RuntimeError):  # the loop is closed: its tasks have ended
                cast(asyncio.AbstractEventLoop, loop).call_soon_threadsafe(_deliver, heard)
        _deliver(of_threads)


def _deliver(news: list[News]) -> None:
    with ExitStack() as calls:  # each, whatever another raises; the last one first
        for stream, items, finished, error in news:
            if finished:
                calls.callback(stream.end, error)
            calls.callback(stream.put, items)


def answer(future: Future[Any], function: Callable[[], Any]) -> None:
    """Set the future to what `function` returns or raises, unless it is cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except StopIteration as error:  # no coroutine could raise it
            failure = RuntimeError("the function raised StopIteration")
            failure.__cause__ = error
            future.set_exception(failure)
        except BaseException as error:  # an exit, too, is the caller's
            future.set_exception(error)
