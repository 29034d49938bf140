"""The one door of a deployment: it reads bodies, chooses replicas, and passes on what they answer.

All else that a server does, the replicas do: each runs the whole app. So a route that is not named
here goes to any of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.exceptions import RayServeException
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from radixcache.base import Tokens
from radixcache.runtime.llm import BUNDLED_MODEL
from radixcache.runtime.replicas.members import MEMBERS
from radixcache.runtime.replicas.prompts import Body, Prompts, parse
from radixcache.runtime.replicas.replica import END, STARTED, Computed, Description
from radixcache.runtime.routing.policy import Router, Standing, preference
from radixcache.runtime.server.cache import name_of_salt
from radixcache.runtime.server.errors import ApiError
from radixcache.runtime.server.generation import event
from radixcache.runtime.server.settings import Options

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

JOIN_SECONDS = 120.0
"""How long a request waits where no replica runs, because the last one has died."""

_RETRY_SECONDS = 1.0

REPLICA = "X-Radixcache-Replica"
"""A header of each answer: who gave it."""

_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_FOR_ALL = ("/v1/cache/flush", "/v1/responses/")
"""Besides what is deleted: nobody knows which replica keeps a response."""
_PORTABLE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


class _Gone(Exception):
    """The replica has died, or was gone before."""


@dataclass(frozen=True)
class Decision:
    """Where a request went, and how all replicas stood for it then."""

    time: float
    path: str
    replica: str
    standings: list[Standing]


class _Relay:
    """Passes messages on to a client; the head waits for the first byte of the body.

    Until then, the request can still go to another replica.
    """

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
        options: as the replicas have them.
        notes: for whoever starts the server.
        router: what it knows of the replicas.
        decisions: the last ones, for `GET /v1/replicas`.
        draining: nothing is taken any more.
    """

    def __init__(
        self, handle: DeploymentHandle, options: Options, prompts: Prompts, note: str = ""
    ) -> None:
        self.options = options
        self.notes = [note]
        self.router = Router()
        self.replicas: dict[str, Description] = {}
        self.decisions: deque[Decision] = deque(maxlen=100)
        self.draining = False
        self._handle = handle
        self._prompts = prompts
        self._died: set[str] = set()
        self._pins: dict[tuple[Any, Any], tuple[float, Scope, Body, bytes]] = {}
        """By salt and name: until when, and the request that made it."""
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = 0
        self._idle = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """Of the model."""
        return [*self.options.served_model_name] or [BUNDLED_MODEL.name]

    @property
    def door(self) -> Ingress:
        """What takes requests in; the same name at a server alone."""
        return self

    @property
    def alive(self) -> bool:
        """Whether any replica runs."""
        return bool(self.replicas)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this lasts, replicas come and go."""
        loop = asyncio.get_running_loop()
        await self._handle.describe.remote("")  # starts Serve's router
        MEMBERS.listen(lambda: loop.call_soon_threadsafe(self._spawn, self._update()))
        await self._any_replica()
        try:
            yield
        finally:
            MEMBERS.listen(None)
            for task in self._tasks:
                task.cancel()

    async def drain(self, grace: float) -> None:
        """Refuse new requests, and give those that run `grace` seconds."""
        self.draining = True
        self._idle.clear()
        if self._open:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace)

    # -- who runs ------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _update(self) -> None:
        """Agree with what Serve says; who joins learns the named prefixes first."""
        async with self._lock:
            self._died &= MEMBERS.names
            for name in self.replicas.keys() - MEMBERS.names:
                self._forget(name)
            for name in MEMBERS.names - self.replicas.keys() - self._died:
                try:
                    found = await self._handle.describe.remote(name)
                    if found is not None:
                        await self._teach(name)
                        self.replicas[name] = found
                        self.router.add(name, found.kv_tokens)
                        self._changed.set()
                except ActorDiedError:
                    self._died.add(name)
                except (RayActorError, RayServeException, _Gone):
                    pass  # it may come back
        if MEMBERS.names - self.replicas.keys() - self._died:
            await asyncio.sleep(_RETRY_SECONDS)
            self._spawn(self._update())

    async def _teach(self, name: str) -> None:
        for salt_and_name, (until, scope, _, body) in [*self._pins.items()]:
            if until < time.monotonic():
                del self._pins[salt_and_name]
            else:
                await self._whole(name, scope, body)

    def _forget(self, name: str) -> None:
        self.replicas.pop(name, None)
        self.router.forget(name)

    def _lose(self, name: str) -> None:
        """It does not answer. If it still runs, it joins again, as if nothing were cached there."""
        if name in self.replicas:
            self._forget(name)
            self._spawn(self._update())

    async def _any_replica(self) -> None:
        """Wait until one runs; 503 if none does."""
        end = time.monotonic() + JOIN_SECONDS
        while not self.replicas:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
            except asyncio.TimeoutError:
                raise ApiError.unavailable("no replica is running") from None

    # -- one request ---------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.draining:
            raise ApiError.unavailable("the server is shutting down")
        self._open += 1
        try:
            body = await _read(receive)
            work = asyncio.ensure_future(self._serve(portable(scope), body, send))
            hang_up = asyncio.ensure_future(_hang_up(receive))
            try:
                await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                hang_up.cancel()
                work.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await work
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        path, fields = scope["path"].removesuffix("/"), parse(body)
        await self._any_replica()
        if path == "/v1/prefixes" and scope["method"] == "POST":
            await self._pin(scope, fields, body, send)
        elif scope["method"] == "DELETE" or path.startswith(_FOR_ALL):
            await self._answer_all(scope, body, send)
        else:
            await self._answer_one(scope, path, fields, body, send)

    async def _answer_one(
        self, scope: Scope, path: str, fields: Body, body: bytes, send: Send
    ) -> None:
        """By the replica where the prompt costs least; by the next one, if that dies in time."""
        salt = fields.get("cache_salt")
        salt = salt if isinstance(salt, str) else None
        pin = self._pins.get((salt, str(fields.get("prefix"))))
        tokens = await asyncio.to_thread(self._prompts.read, path, fields, pin and pin[2])
        bound = await self._bound_to(scope, fields)
        key, relay = uuid4().hex, _Relay(send)
        generates = path in _GENERATES and scope["method"] == "POST"
        try:
            while True:
                await self._any_replica()
                if generates:
                    name = self._choose(key, path, tokens, salt, bound)
                else:
                    name = bound or str(self.router.order(tokens, salt)[0])
                try:
                    async with aclosing(self._messages(name, scope, body)) as messages:
                        async for message in messages:
                            if message["type"] == STARTED:
                                self.router.started(key)
                            elif message["type"] == END:
                                self._note(key, name, message["computed"])
                            else:
                                await relay.pass_on(message, name)
                    return
                except _Gone:
                    bound = None
                    if relay.begun:  # what is cut off without a word ends with the connection
                        if relay.is_stream:
                            await send({"type": "http.response.body", "body": _broken(path)})
                        return
        finally:
            self.router.release(key)

    def _choose(
        self, key: str, path: str, tokens: Tokens, salt: str | None, bound: str | None
    ) -> str:
        """Book a request on the best replica, or on that which it is bound to."""
        standings = self.router.standings(tokens, salt)
        name = bound if bound in self.replicas else str(min(standings, key=preference).replica)
        self.router.book(key, name, tokens, salt)
        self.decisions.append(Decision(time.time(), path, name, standings))
        return name

    def _note(self, key: str, name: str, computed: list[Computed]) -> None:
        """Book what a replica has computed in place of what was expected."""
        for tokens, salt, answers in computed:
            if name in self.replicas:
                self.router.book(key, name, tokens, salt)
                self.router.release(key, *answers)

    async def _messages(
        self, name: str, scope: Scope, body: bytes
    ) -> AsyncGenerator[Message, None]:
        """What a replica answers, `STARTED` and `END` included; `_Gone` if it has died."""
        stream = self._handle.options(stream=True).answer.remote(name, scope, body)
        is_whole = False
        try:
            async for batch in stream:
                for message in batch:
                    is_whole = message["type"] == END
                    yield message
        except (RayActorError, RayServeException) as error:
            if isinstance(error, ActorDiedError):
                self._died.add(name)
            self._lose(name)
            raise _Gone from error
        finally:
            if not is_whole:
                with suppress(Exception):  # as it ended
                    stream.cancel()
        if not is_whole:  # nobody of that name runs any more
            self._lose(name)
            raise _Gone

    # -- all replicas --------------------------------------------------------------------------

    async def _whole(self, name: str, scope: Scope, body: bytes) -> list[Message]:
        """The messages of an answer that is small."""
        messages = [message async for message in self._messages(name, scope, body)]
        return [message for message in messages if message["type"].startswith("http.")]

    async def ask_all(self, scope: Scope, body: bytes) -> dict[str, list[Message]]:
        """What each replica answers, but for those that die over it."""
        names = sorted(self.replicas)
        found = await asyncio.gather(
            *(self._whole(name, scope, body) for name in names), return_exceptions=True
        )
        answers: dict[str, list[Message]] = {}
        for name, answer in zip(names, found, strict=True):
            if isinstance(answer, list):
                answers[name] = answer
            elif not isinstance(answer, _Gone):
                raise answer
        if not answers:
            raise ApiError.unavailable("no replica is running")
        return answers

    async def _answer_all(self, scope: Scope, body: bytes, send: Send) -> None:
        """Each replica does it: a flush fails if one refuses, all else succeeds if one has it."""
        answers = await self.ask_all(scope, body)
        by_status = sorted(answers.items(), key=lambda item: item[1][0]["status"])
        name, messages = by_status[-1 if scope["path"] == "/v1/cache/flush" else 0]
        if messages[0]["status"] == 200:
            self._unpin(scope)
        await send_all(messages, name, send)

    def _unpin(self, scope: Scope) -> None:
        """Whoever joins from now on need not know the prefix that was deleted, if one was."""
        *_, place, name = scope["path"].split("/")
        salt = Headers(scope=scope).get("cache-salt")
        for key in [*self._pins]:
            of_client = place == "prefixes" and key == (salt, name)
            if of_client or (name_of_salt(key[0]), key[1]) == (place, name):
                del self._pins[key]

    async def _pin(self, scope: Scope, fields: Body, body: bytes, send: Send) -> None:
        """On all replicas, or on none."""
        async with self._lock:  # who joins meanwhile learns it with the others
            answers = await self.ask_all(scope, body)
            refused = [n for n, messages in answers.items() if messages[0]["status"] != 200]
            key = fields.get("cache_salt"), fields.get("name")
            if not refused:
                until = time.monotonic() + (fields.get("lifetime") or float("inf"))
                self._pins[key] = until, scope, fields, body
            elif len(refused) < len(answers):
                headers = _with_salt(scope["headers"], key[0])
                undo = {**scope, "path": f"/v1/prefixes/{key[1]}", "headers": headers}
                for name in answers.keys() - refused:
                    with suppress(_Gone):
                        await self._whole(name, {**undo, "method": "DELETE"}, b"")
        name = refused[0] if refused else min(answers)
        await send_all(answers[name], name, send)

    async def _bound_to(self, scope: Scope, fields: Body) -> str | None:
        """The replica that must answer: that of `?replica=`, or of the response before."""
        named = QueryParams(scope["query_string"]).get("replica")
        if named is None and scope["path"].startswith("/v1/cache"):
            # who looks again sees the same one
            return min(self.replicas, default=None)
        if named is not None and named not in self.replicas:
            raise ApiError.not_found(f"no replica {named!r} is running", "replica")
        before = fields.get("previous_response_id")
        if named is not None or not isinstance(before, str):
            return named
        headers = _with_salt(scope["headers"], fields.get("cache_salt"))
        ask = {**scope, "method": "GET", "path": f"/v1/responses/{before}", "headers": headers}
        answers = await self.ask_all(ask, b"")
        return next((n for n, found in answers.items() if found[0]["status"] == 200), None)


async def _read(receive: Receive) -> bytes:
    """The whole body."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_all(messages: list[Message], replica: str, send: Send) -> None:
    relay = _Relay(send)
    for message in messages:
        await relay.pass_on(message, replica)


def portable(scope: Scope) -> Scope:
    """What of a scope can go to another process."""
    return {name: scope[name] for name in _PORTABLE if name in scope}


def _with_salt(headers: list[tuple[bytes, bytes]], salt: Any) -> list[tuple[bytes, bytes]]:
    """For routes that have no body to say the salt in."""
    kept = [(name, value) for name, value in headers if name != b"cache-salt"]
    return [*kept, (b"cache-salt", salt.encode())] if isinstance(salt, str) else kept


def _broken(path: str) -> bytes:
    """The end of a stream whose replica has died, in the words of its API."""
    error = ApiError.unavailable("the replica that was answering has died")
    if path == "/v1/responses":
        told = {"type": "error", "code": "server_error", "message": error.message, "param": None}
        return event(told).encode()
    end = "" if path == "/v1/messages" else "data: [DONE]\n\n"
    return (event(error.body_at(path)) + end).encode()
