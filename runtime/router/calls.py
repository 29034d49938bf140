"""Calls a replica by its name, through Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING

from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.types import Message, Scope

from radixcache.runtime.router.ingress import Gone
from radixcache.runtime.router.replica import END, HEARTBEAT, Description

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


SILENCE = 4 * HEARTBEAT
"""Seconds after which a replica that says nothing counts as gone. Ray alone takes a minute to give
up a node that hangs."""


class Calls:
    """The replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def describe(self, name: str) -> Description | None:
        """A replica's description; None if it cannot answer now, `Gone` if it has died."""
        try:
            found: Description | None = await self._handle.describe.remote(name)
        except (RayError, RayServeException) as error:
            raise _gone(name, error) from error
        return found

    async def answer(self, name: str, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """The messages of a replica's app, `STARTED` and `END` included; `Gone` if none answers."""
        stream = self._handle.options(stream=True).answer.remote(name, scope, body)
        is_whole = False
        try:
            while (batch := await asyncio.wait_for(anext(stream, None), SILENCE)) is not None:
                for message in batch:
                    is_whole = message["type"] == END
                    yield message
        except (RayError, RayServeException, asyncio.TimeoutError) as error:
            raise _gone(name, error) from error
        finally:
            if not is_whole:
                with suppress(Exception):  # it may have ended
                    stream.cancel()
        if not is_whole:  # no replica of that name takes requests
            raise Gone(name)


def _gone(name: str, error: Exception) -> Exception:
    """`Gone` for an error of Ray's, or the error itself if the replica's own code raised it."""
    if isinstance(error, RayTaskError):
        return error
    return Gone(name, has_died=isinstance(error, ActorDiedError))
