"""`radixcache serve`: the socket, the signals, and the loop between them."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from radixcache.runtime.server.args import KEEP_ALIVE
from radixcache.runtime.server.http.listener import address_of

HEAD_SECONDS = 10.0
"""A request's head must come within this, counted from the connection or its first byte."""

LINGER_SECONDS, REST_SECONDS, BUSY_SECONDS, READ_BYTES = 2.0, 0.2, 0.001, 2048
"""A connection rests after a piece of so many bytes that took so long: chunks of one byte do."""

FLUSH_SECONDS = 3
"""Seconds for clients to read the rest of their answers, once no request runs."""

_GARBAGE = 50_000
"""New objects between collections of garbage, which hold up all; a large body has as many."""


def configure(
    app: ASGIApp, log_level: str = "warning", keep_alive: float = KEEP_ALIVE
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Connection,
        log_level=log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a header must not say that a client is local
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # it takes any number
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


def serve(app: FastAPI, listener: socket.socket, shutdown_timeout: float) -> None:
    """Serve an app until a signal ends it; its state needs a `context` and a `frontend`."""
    announce(app.state.context, listener)
    keep_alive = app.state.context.options.keep_alive_timeout
    server = Server(configure(app, keep_alive=keep_alive), shutdown_timeout)
    server.frontend = app.state.frontend
    server.run([listener])


def announce(context: Any, listener: socket.socket) -> None:
    """Print the address and notes, and take what is loaded out of garbage collection."""
    gc.collect()
    gc.freeze()  # a collection would hold up all streams for a sixth of a second
    gc.collect()  # resets the count of old objects, a quarter of which Python would wait for
    gc.set_threshold(_GARBAGE)
    host = listener.getsockname()[0]
    if context.options.api_key is None and not ip_address(host).is_loopback:
        warning = "Warning: without an --api-key, anyone who reaches this address may use it"
        print(warning, file=sys.stderr)
    names, where = ", ".join(context.names), address_of(listener)
    print(f"Serving {names} at {where}", *context.notes, sep="\n", file=sys.stderr, flush=True)


class Frontend(Protocol):
    """Takes requests.

    Attributes:
        draining: new requests are refused; set it, then call `drain`.
        alive: an engine or a replica runs.
    """

    draining: bool

    @property
    def alive(self) -> bool: ...
    async def drain(self, grace: float) -> None: ...


def _closing(app: Any, conn: h11.Connection) -> Any:
    """The app; an answer of it that comes before the request's body closes the connection, after
    `LINGER_SECONDS`, since Node reads no answer if the connection is reset while it writes."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def take_rest() -> None:
            while (await receive()).get("more_body"):
                pass

        async def send_last(message: Message) -> None:
            if conn.their_state is h11.SEND_BODY and not message.get("more_body"):
                begins, waits = message["type"] == "http.response.start", LINGER_SECONDS
                if not begins:
                    await send({**message, "more_body": True})
                    message = {"type": "http.response.body"}
                if not conn.they_are_waiting_for_100_continue:  # a body that comes just now is fine
                    with suppress(asyncio.TimeoutError, asyncio.CancelledError):  # it shuts down
                        await asyncio.wait_for(take_rest(), waits / 20 if begins else waits)
                if begins and conn.their_state is h11.SEND_BODY:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await app(scope, receive, send_last)

    return answer


class _Connection(H11Protocol):
    """A connection that is closed if a request's head does not come in time.

    uvicorn limits a head's size and the time between requests, but not this, so that idle
    connections could use up all file descriptors.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app = _closing(self.app, self.conn)
        with suppress(AttributeError):  # uvloop's brings 250 KB, always
            transport.max_size = READ_BYTES  # of asyncio: 256 KiB, of which all would wait
        self._watch()

    def data_received(self, data: bytes) -> None:
        began = time.thread_time()
        super().data_received(data)
        self._watch()
        if time.thread_time() - began > BUSY_SECONDS:
            self.transport.pause_reading()
            self.loop.call_later(REST_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if not self.flow.read_paused:  # by uvicorn, which resumes
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """Lets requests end on the first signal, and dies of the second.

    The socket stays open while they end, so that new requests get status 503.
    """

    frontend: Frontend

    def __init__(self, config: uvicorn.Config, grace: float) -> None:
        super().__init__(config)
        self._grace = grace
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit or (self._loop is not None and self.frontend.draining):
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        elif self._loop is None or not self.frontend.alive:
            super().handle_exit(sig, frame)
        else:
            self.frontend.draining = True
            self._loop.call_soon_threadsafe(self._begin_drain, sig, frame)

    def _begin_drain(self, sig: int, frame: Any) -> None:
        async def drain() -> None:
            notice = asyncio.get_running_loop().call_later(0.5, self._announce_drain)
            await self.frontend.drain(self._grace)
            notice.cancel()
            super(Server, self).handle_exit(sig, frame)

        self._drain = asyncio.create_task(drain())

    def _announce_drain(self) -> None:
        text = f"Running requests have {self._grace:g} s to end; a second signal ends all at once"
        print(text, file=sys.stderr, flush=True)
