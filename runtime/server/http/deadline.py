"""The time that the body of a request may take."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_SECONDS = 60.0
"""From the head to the end of the body."""


class BodyDeadline:
    """Ends a request with status 408 if its body does not come in time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BODY_SECONDS
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:  # the next message is that the client has hung up
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise HTTPException(
                    408,
                    f"the request's body did not come within {BODY_SECONDS:g} seconds",
                    headers={"Connection": "close"},
                ) from None
            except asyncio.CancelledError:  # who serves ends what has not even come
                raise HTTPException(
                    503, "the server is shutting down", headers={"Connection": "close"}
                ) from None
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)
