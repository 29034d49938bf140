"""The entry point of a deployment: reads bodies, chooses replicas, and passes on answers.

Each replica runs the whole app, so any replica can answer a route that is not named here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Hashable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlencode
from uuid import uuid4
from weakref import WeakValueDictionary

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.router.members import MEMBERS
from radixcache.runtime.router.pins import Pin, Pins, deletion, key_of, salt_of, with_salt
from radixcache.runtime.router.policy import Router, Standing, preference
from radixcache.runtime.router.prompts import Body, Prompts, parse
from radixcache.runtime.router.replica import END, STARTED, Computed, Description
from radixcache.runtime.server.api.exchange import event, wait_for_disconnect
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.bodies import on_thread
from radixcache.runtime.server.http.errors import ApiError
from radixcache.tokens import Tokens

T = TypeVar("T")

_log = logging.getLogger("radixcache")

TRIES = 3
"""Most replicas that one request is sent to, as it may be the reason that they die."""

JOIN_SECONDS = 120.0
"""How long a request waits for a replica if none runs."""

_RETRY_SECONDS = 1.0

REPLICA = "X-Radixcache-Replica"
"""A header of each answer, with the replica's name."""

_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_FOR_ALL = ("/v1/cache/flush", "/v1/responses/")
"""Paths that go to all replicas, besides deletions: any replica may have the response."""
_PORTABLE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


class Gone(Exception):
    """The replica does not answer: it has died or is about to."""

    def __init__(self, name: str, has_died: bool = False) -> None:
        super().__init__(name)
        self.name = name
        self.has_died = has_died


class Calls(Protocol):
    """How to reach a replica; see `calls.py`."""

    async def describe(self, name: str) -> Description | None: ...
    def answer(self, name: str, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]: ...


@dataclass(frozen=True)
class Decision:
    """Where a request went, and all replicas' standings at the time."""

    time: float
    path: str
    replica: str
    standings: list[Standing]


class _Relay:
    """Passes messages on to a client. The head waits for the first byte of the body, so that until
    then the request can go to another replica."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self.begun = False
        self.is_stream = False

    async def pass_on(self, message: Message, replica: str) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[REPLICA] = replica
            self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
            self._head = message
            return
        if self._head is not None and (message.get("body") or not message.get("more_body")):
            head, self._head, self.begun = self._head, None, True
            await self._send(head)
        if self._head is None:
            await self._send(message)


class Ingress:
    """An ASGI app over the replicas of one deployment; for one event loop.

    Attributes:
        options: the replicas' settings.
        notes: lines to print at the start.
        decisions: the last ones, for `GET /v1/replicas`.
        draining: new requests are refused.
    """

    def __init__(self, calls: Calls, options: ServerArgs, prompts: Prompts, note: str = "") -> None:
        self.options = options
        self.notes = [note]
        self.router = Router()
        self.replicas: dict[str, Description] = {}
        self.decisions: deque[Decision] = deque(maxlen=100)
        self.draining = False
        self._calls = calls
        self._prompts = prompts
        self._died: set[str] = set()
        self._pins = Pins()
        self._changed = asyncio.Event()
        self._joining: set[str] = set()
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = 0
        self._idle = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """The model's names."""
        return [*self.options.served_model_name] or [BUNDLED_MODEL.name]

    @property
    def alive(self) -> bool:
        """Whether any replica runs."""
        return bool(self.replicas)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A context in which replicas join and leave."""
        loop = asyncio.get_running_loop()
        with suppress(Gone):
            await self._calls.describe("")  # starts Serve's router
        MEMBERS.listen(lambda: loop.call_soon_threadsafe(self._update))
        await asyncio.gather(*self._update())  # all join before the first request
        await self._any_replica()
        try:
            yield
        finally:
            MEMBERS.listen(None)
            for task in self._tasks:
                task.cancel()

    async def drain(self, grace: float) -> None:
        """Refuse new requests, and wait `grace` seconds for running ones."""
        self.draining = True
        self._idle.clear()
        if self._open:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace)

    # -- members -------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _update(self) -> list[asyncio.Task[None]]:
        """Drop and add replicas as Serve says; returns the tasks that add new ones."""
        self._died &= MEMBERS.names
        for name in self.replicas.keys() - MEMBERS.names:
            self._forget(name)
        new = sorted(MEMBERS.names - self.replicas.keys() - self._died - self._joining)
        self._joining |= {*new}
        return [self._spawn(self._join(name)) for name in new]

    async def _join(self, name: str) -> None:
        """Add a replica once it is ready, unless it dies."""
        try:
            if not await self._is_ready(name):
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._joining.discard(name)
        self._update()

    async def _is_ready(self, name: str) -> bool:
        """Pin the others' prefixes on a replica and add it; returns whether that succeeded."""
        try:
            found = await self._calls.describe(name)
            if found is None:
                return False
            known: dict[Any, Pin] = {}
            while known != (pins := self._pins.live()):
                for key in [key for key in known if known[key] != pins.get(key)]:
                    pin = known.pop(key)
                    await self._ask_one(name, deletion(pin.scope, pin.fields), b"")
                for key in pins.keys() - known.keys():
                    await self._ask_one(name, pins[key].scope, pins[key].body)
                    known[key] = pins[key]
        except Gone as gone:
            self._lose(gone)
            return False
        self._prompts.limit(found.max_context)
        self.replicas[name] = found
        folder = None if found.kv_dir is None else (found.node, found.kv_dir)
        sizes = found.kv_tokens, found.max_num_seqs, found.lower_tokens
        self.router.add(name, *sizes, folder)
        self._changed.set()
        return True

    def _forget(self, name: str) -> None:
        self.replicas.pop(name, None)
        self.router.forget(name)

    def _lose(self, gone: Gone) -> None:
        """Forget a replica; if it still runs, it joins again, as if its cache were empty."""
        if gone.has_died:
            self._died.add(gone.name)
        if gone.name in self.replicas:
            what = "has died" if gone.has_died else "does not answer"
            _log.warning("replica %s on %s %s", gone.name, self.replicas[gone.name].node, what)
            self._forget(gone.name)
            self._update()

    async def _any_replica(self) -> None:
        """Wait until a replica runs; 503 if none does."""
        end = time.monotonic() + JOIN_SECONDS
        while not self.replicas:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
            except asyncio.TimeoutError:
                raise ApiError(503, "no replica is running") from None

    # -- one request ---------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        if self.draining:
            raise ApiError(503, "the server is shutting down")
        self._open += 1
        work = asyncio.ensure_future(self._serve(portable(scope), body, send))
        hang_up = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            hang_up.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        path, fields = scope["path"].removesuffix("/"), await on_thread(parse, body)
        await self._any_replica()
        pins = path == "/v1/prefixes" and scope["method"] == "POST"
        if pins or scope["method"] == "DELETE" or path.startswith(_FOR_ALL):
            work = self._pin(scope, fields, body) if pins else self._answer_all(scope, body)
            # If the client hangs up, the work must still be done on all replicas.
            name, messages = await asyncio.shield(self._spawn(work))
            relay = _Relay(send)
            for message in messages:
                await relay.pass_on(message, name)
        else:
            await self._answer_one(scope, path, fields, body, send)

    async def _answer_one(
        self, scope: Scope, path: str, fields: Body, body: bytes, send: Send
    ) -> None:
        """Let the replica answer where the prompt costs least, or the next one if that dies."""
        salt = salt_of(fields)
        prefix = self._pins.find(salt, fields.get("prefix"))
        client = ("salt", salt) if salt else (scope.get("client") or [None])[0]
        async with self._turns.setdefault(client, asyncio.Lock()):  # one thread for each client
            tokens = await asyncio.to_thread(self._prompts.read, path, fields, prefix)
        bound, scope = await self._bound_to(scope, fields)
        key, relay = uuid4().hex, _Relay(send)
        generates = path in _GENERATES and scope["method"] == "POST"
        try:
            for _ in range(TRIES):
                await self._any_replica()
                if generates:
                    name = self._choose(key, path, tokens, salt, bound)
                else:
                    name = bound or str(self.router.order(tokens, salt)[0])
                try:
                    async with aclosing(self._calls.answer(name, scope, body)) as messages:
                        async for message in messages:
                            if message["type"] == STARTED:
                                self.router.started(key)
                            elif message["type"] == END:
                                self._note(key, name, message["computed"])
                            else:
                                await relay.pass_on(message, name)
                    return
                except Gone as gone:
                    self._lose(gone)
                    bound = None
                    if relay.begun:  # too late for another replica
                        if relay.is_stream:
                            await send({"type": "http.response.body", "body": _broken(path)})
                        return
            raise ApiError(503, f"{TRIES} replicas have died over this request")
        finally:
            self.router.release(key)

    def _choose(
        self, key: str, path: str, tokens: Tokens, salt: str | None, bound: str | None
    ) -> str:
        """Book a request on the best replica, or on the one to which it is bound."""
        standings = self.router.standings(tokens, salt)
        name = bound if bound in self.replicas else str(min(standings, key=preference).replica)
        self.router.book(key, name, tokens, salt)
        self.decisions.append(Decision(time.time(), path, name, standings))
        return name

    def _note(self, key: str, name: str, computed: list[Computed]) -> None:
        """Replace a booking with what the replica has computed."""
        for tokens, salt, answers in computed:
            if name in self.replicas:
                self.router.book(key, name, tokens, salt)
                self.router.release(key, *answers)

    # -- all replicas --------------------------------------------------------------------------

    async def _ask_one(self, name: str, scope: Scope, body: bytes) -> list[Message]:
        """All messages of a small answer."""
        messages = [message async for message in self._calls.answer(name, scope, body)]
        return [message for message in messages if message["type"].startswith("http.")]

    async def ask_all(
        self, scope: Scope, body: bytes, patience: float | None = None
    ) -> dict[str, list[Message]]:
        """The answers of all replicas, also of those that join meanwhile.

        Replicas that die or take longer than `patience` seconds are left out.
        """
        answers: dict[str, list[Message]] = {}

        async def ask(name: str) -> None:
            try:
                answers[name] = await asyncio.wait_for(self._ask_one(name, scope, body), patience)
            except Gone as gone:
                self._lose(gone)
            except asyncio.TimeoutError:
                pass

        asked: set[str] = set()
        while new := self.replicas.keys() - asked:
            asked |= new
            await asyncio.gather(*map(ask, new))
        if not answers:
            raise ApiError(503, "no replica is running")
        return dict(sorted(answers.items()))

    async def _answer_all(self, scope: Scope, body: bytes) -> tuple[str, list[Message]]:
        """Ask all replicas: a flush fails if one refuses, other requests succeed if one does."""
        async with self._turns.setdefault(key_of(scope), asyncio.Lock()):
            answers = await self.ask_all(scope, body)
            by_status = sorted(answers.items(), key=lambda item: item[1][0]["status"])
            name, messages = by_status[-1 if scope["path"] == "/v1/cache/flush" else 0]
            if messages[0]["status"] == 200:
                self._pins.drop(scope)
        return name, messages

    async def _pin(self, scope: Scope, fields: Body, body: bytes) -> tuple[str, list[Message]]:
        """Pin a prefix on all replicas, or on none."""
        undo = deletion(scope, fields)
        async with self._turns.setdefault(key_of(undo), asyncio.Lock()):
            answers = await self.ask_all(scope, body)
            refused = [name for name, found in answers.items() if found[0]["status"] != 200]
            name = min(refused or answers)
            if not refused:
                self._pins.keep(Pin(scope, fields, _expiry(answers[name])))
            for other in answers.keys() - refused if refused else ():
                with suppress(Gone):
                    await self._ask_one(other, undo, b"")
        return name, answers[name]

    async def _bound_to(self, scope: Scope, fields: Body) -> tuple[str | None, Scope]:
        """The replica that must answer, if any (that of `?replica=` or of the previous response),
        and the scope to send."""
        if scope["path"].startswith("/v1/cache"):
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), True))
            named = query.pop("replica", None)
            if named is not None and named not in self.replicas:
                raise ApiError(404, f"no replica {named[:100]!r} is running", "replica")
            # The same one each time, so that a page that polls sees one tree.
            bound = named or min(self.replicas, default=None)
            return bound, {**scope, "query_string": urlencode(query).encode()}
        before = fields.get("previous_response_id")
        if not isinstance(before, str):
            return None, scope
        ask = {**with_salt(scope, fields), "method": "GET", "path": f"/v1/responses/{before}"}
        return await self._first_to_have(ask), scope

    async def _first_to_have(self, ask: Scope) -> str | None:
        """The first replica to answer 200, without waiting for others, of which one may hang."""
        tasks = {self._spawn(self._ask_one(name, ask, b"")): name for name in self.replicas}
        waiting = {*tasks}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        if task.result()[0]["status"] == 200:
                            return tasks[task]
                    except Gone as gone:
                        self._lose(gone)
            return None
        finally:
            for task in waiting:
                task.cancel()


def portable(scope: Scope) -> Scope:
    """The parts of a scope that can be sent to another process."""
    return {name: scope[name] for name in _PORTABLE if name in scope}


def _expiry(answer: list[Message]) -> float | None:
    """When a prefix that a replica has pinned expires, in seconds of `time.monotonic`."""
    left = parse(b"".join(message.get("body", b"") for message in answer)).get("expires_in")
    return None if left is None else time.monotonic() + left


def _broken(path: str) -> bytes:
    """The end of a stream whose replica has died, in its API's format."""
    error = ApiError(503, "the replica that was answering has died, or hangs")
    if path == "/v1/responses":
        body = {"type": "error", "code": "server_error", "message": error.message, "param": None}
        return event(body).encode()
    end = "" if path == "/v1/messages" else "data: [DONE]\n\n"
    return (event(error.body_at(path)) + end).encode()
