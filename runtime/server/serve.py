"""`radixcache serve`: the socket, the signals, and the loop between them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from radixcache.errors import InvalidRequest
from radixcache.runtime.server.jobs import Jobs

FLUSH_SECONDS = 3
"""For connections to take what is left, once nothing runs any more."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `InvalidRequest` says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:  # whose own text may go on about the address
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise InvalidRequest(f"cannot listen on {host} port {port}: {reason}") from None
    except OverflowError:
        raise InvalidRequest(f"port must be from 0 to 65535, not {port}") from None
    except (TypeError, ValueError):  # what no name can be made of
        raise InvalidRequest(f"not a host: {host!r}") from None


def serve(app: FastAPI, listener: socket.socket, shutdown_timeout: float) -> None:
    """Serve an app of `create_app` until a signal ends it."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who is on this machine is not for a header to say
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    if app.state.backend.options.api_key is None and not ip_address(host).is_loopback:
        warning = "Warning: without an --api-key, whoever reaches this address may use the server"
        print(warning, file=sys.stderr)
    host = f"[{host}]" if ":" in host else host
    names = ", ".join(app.state.backend.names)
    placement = app.state.backend.llm.engine.model.placement
    where = f"http://{host}:{port}"
    print(f"Serving {names} at {where} ({placement})", file=sys.stderr, flush=True)
    _Server(config, app.state.backend.jobs, shutdown_timeout).run([listener])


class _Server(uvicorn.Server):
    """Lets requests end on the first signal, and dies of the second.

    While they end, the socket stays open, so that who comes is told 503 and not left to guess.
    """

    def __init__(self, config: uvicorn.Config, jobs: Jobs, grace: float) -> None:
        super().__init__(config)
        self._jobs = jobs
        self._grace = grace
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or not self._jobs.worker.alive:
            super().handle_exit(sig, frame)
        elif not self._jobs.draining:
            self._jobs.draining = True
            self._loop.call_soon_threadsafe(self._begin_drain, sig, frame)
        else:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    def _begin_drain(self, sig: int, frame: Any) -> None:
        async def drain() -> None:
            await self._jobs.drain(self._grace)
            super(_Server, self).handle_exit(sig, frame)

        self._drain = asyncio.create_task(drain())
