"""Runs an engine on one thread, for callers on all others.

Everything that touches the engine, its cache or its named prefixes runs on that thread. It takes
functions from a queue between steps, and blocks on the queue when there is nothing to compute.
Requests of all callers are batched together. Each listener hears the news of a step in one call,
however many jobs it listens for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from radixcache.errors import EngineFailed, EngineStopped, RanksLost, WrongThread
from radixcache.runtime.engine.named_prefixes import NamedPrefixes
from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.request import Request

T = TypeVar("T")

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.engine.engine import Engine

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 2
"""Steps in a row that may fail before their requests do."""


class News(NamedTuple):
    """The news of a step for a job.

    Attributes:
        items: the results of `Job.report` for its requests.
        finished: no more news will come.
        error: why, if not all requests ended by themselves.
    """

    job: Job
    items: list[Any]
    finished: bool
    error: Exception | None


class Job:
    """Requests that are submitted together.

    Attributes:
        stream: report their outputs after every token, not only that they have ended.
        requests: prompts and finished requests never change; only the engine's thread may read
            anything else.
    """

    tell: Callable[[list[News]], object]
    """See `Worker.submit`."""

    def __init__(self, stream: bool = False) -> None:
        self.stream = stream
        self.requests: list[Request] = []

    def outputs(self) -> list[RequestOutput]:
        """The requests' outputs in the order of their prompts; once all have ended."""
        return [request.output() for request in self.requests]

    def report(self, request: Request) -> Any:
        """The news of a request that got a token or ended, or None.

        Called on the engine's thread.
        """
        if self.stream:
            return request.output()
        return True if request.finished else None

    def report_prefill(self) -> Any:
        """The news of the prompts before the first token, or None. See `follow`.

        Called on the engine's thread.
        """
        return None

    def note_end(self, request: Request) -> None:
        """Called on the engine's thread once for each request that has ended, for any reason."""


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
        self._jobs: dict[Request, Job] = {}
        """The requests that have not ended."""
        self._followed: set[Job] = set()
        self._discarded: list[Request] = []
        """Requests that no caller waits for, to be aborted."""
        self._failed_steps = 0
        self.num_steps = 0
        """Steps run so far."""

    # -- on any thread -------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the thread answers calls and can run steps."""
        return not self._stop and self._engine.model.alive

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
        if not self._started:
            with self._starting:
                if self._thread.ident is None and not self._stop:
                    self._thread.start()
                self._started = True
        if self._stop or not self._thread.is_alive():  # or this process was forked off its own
            self._refuse_commands()
        return future

    def submit(
        self, job: Job, add: Callable[[], list[Request]], tell: Callable[[list[News]], object]
    ) -> Future[None]:
        """Queue the requests that `add` adds to the engine.

        The future raises what `call`'s raises. The submitter calls `abort` to leave a job early.

        Args:
            tell: called on the engine's thread with a step's news for all jobs that were submitted
                with this same function; it must be quick.

        Raises:
            WrongThread: on the engine's thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise WrongThread("the engine's own thread cannot wait for an answer of the engine")

        def run() -> None:
            job.requests = add()
            self._jobs.update(dict.fromkeys(job.requests, job))
            if not job.requests:
                tell([News(job, [], True, None)])

        job.tell = tell

        return self.call(run)

    def follow(self, job: Job) -> None:
        """Report a job's prefill now and after each step, until it has a token."""

        def run() -> None:
            self._followed.add(job)
            self._tell(self._prefilled())

        self._queue(run)

    def abort(self, job: Job) -> Future[None]:
        """Abort the unfinished requests of a job after the current step.

        A finalizer may call this, in the middle of a step, too: it must not wait for the future.
        """
        return self._queue(lambda: self.discard([r for r in job.requests if r in self._jobs]))

    def close(self) -> None:
        """End the thread after the current step, and every job with an error."""
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
                self._tell([News(job, [], True, stopped) for job in {*self._jobs.values()}])
            finally:
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
            self._fail([*self._jobs], error)

    def _run_commands(self) -> None:
        """Run the queued commands; wait for one if the engine has no work."""
        wait = not self._engine.has_work
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
        except RanksLost as error:  # it has been logged
            self._fail([*self._jobs], error)
            self._stop = True
            return
        except EngineStopped:  # the model was closed in the middle of it
            self._stop = True
            return
        except Exception as error:
            log.exception("a step failed")
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                self._failed_steps = 0
                in_step = {sequence.request for sequence in self._engine.failed_step}
                suspects = [request for request in self._jobs if request in in_step]
                self._fail(suspects or [*self._jobs], error)
            changed = [request for request in self._jobs if request.finished]  # in it, or before
        else:
            self._failed_steps = 0
        changed = [request for request in changed if request in self._jobs]
        items: dict[Job, list[Any]] = {}
        for request in changed:
            job = self._jobs[request]
            item = job.report(request)
            items.setdefault(job, []).extend(() if item is None else (item,))
            if request.finished:
                job.note_end(request)
        news = self._prefilled()
        for job, reported in items.items():
            finished = all(request.finished for request in job.requests)
            if reported or finished:
                news.append(News(job, reported, finished, None))
        self._tell(news)
        for request in changed:
            if request.finished:
                del self._jobs[request]

    def _prefilled(self) -> list[News]:
        """The prefill news of followed jobs."""
        for job in [*self._followed]:
            if any(r.first_token is not None or r not in self._jobs for r in job.requests):
                self._followed.remove(job)
        progress = [(job, job.report_prefill()) for job in self._followed]
        return [News(job, [item], False, None) for job, item in progress if item is not None]

    def _fail(self, requests: list[Request], error: Exception) -> None:
        """End the jobs of these requests with an error."""
        failure = EngineFailed(f"the engine failed: {error}")
        failure.__cause__ = error
        jobs = dict.fromkeys(self._jobs[request] for request in requests)
        try:
            self.discard([request for request, job in self._jobs.items() if job in jobs])
        finally:
            self._tell([News(job, [], True, failure) for job in jobs])

    def discard(self, requests: list[Request]) -> None:
        """Abort requests, on the engine's thread; what fails is tried again before a step."""
        for request in requests:
            job = self._jobs.pop(request, None)
            if job is not None:
                job.note_end(request)
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
        listeners: dict[Callable[[list[News]], object], list[News]] = {}
        for one in news:
            listeners.setdefault(one.job.tell, []).append(one)
        with ExitStack() as calls:  # each, whatever another raises
            for tell, heard in listeners.items():
                calls.callback(tell, heard)


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
