"""Answers requests while a model loads, then hands the socket over to the model's app."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from radixcache.runtime.server import guards
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http import static
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.http.serve import Server, announce, configure


class Loading:
    """A server that runs while its ``with`` block loads a model, until `serve` gives it an app.

    It runs on a thread of its own; the main thread loads, so that a signal or an error ends the
    load. Until then the page's files are served, and everything else is 503.
    """

    def __init__(self, options: ServerArgs, listener: socket.socket) -> None:
        self._app = FastAPI(lifespan=self._live, docs_url=None, redoc_url=None, openapi_url=None)
        self._app.include_router(static.router)
        self._app.add_exception_handler(HTTPException, self._refuse)
        guards.install(self._app, options)
        self._progress: tuple[str, float | None] = "starting", 0.0
        self._listener = listener
        self._server = Server(
            configure(self, keep_alive=options.keep_alive_timeout), options.shutdown_timeout
        )
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def __enter__(self) -> Loading:
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def report(self, stage: str, share: float | None) -> None:
        """Set what `/health` reports; see `radixcache.runtime.model.progress`."""
        self._progress = stage, share

    def serve(self, app: FastAPI, close: Callable[[], None]) -> None:
        """Let an app like `create_app`'s answer until a signal comes, then call `close`, which a
        second signal ends."""
        asyncio.run_coroutine_threadsafe(self._hand_over(app), self._loop).result()
        self._server.frontend = app.state.frontend
        with self._server.capture_signals():
            announce(app.state.context, self._listener)
            self._thread.join()
            close()  # here, since a signal that is raised again may end the process

    @asynccontextmanager
    async def _live(self, _: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as self._stack:
            yield

    async def _hand_over(self, app: FastAPI) -> None:
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    async def _refuse(self, request: Request, _: Exception) -> JSONResponse:
        stage, share = self._progress
        known = "" if share is None else f" ({100 * share:.0f} %)"
        error, path = ApiError(503, f"the model is loading{known}"), request.url.path
        body = error.body_at(path)
        if path == "/health":
            body |= {"status": "loading", "stage": stage, "share": share}
        return JSONResponse(body, error.status, headers=error.headers)
