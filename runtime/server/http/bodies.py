"""Reads the bodies of requests, large ones on threads: they hold up nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from radixcache.runtime.server.http.errors import ApiError, as_api_error

MAX_VALUES = 1_000_000
"""JSON values of a body, about: reading as many takes a tenth of a second."""

SMALL = 4096
"""Bytes of a body that is read at once, and waits for no larger one."""

_readers = ThreadPoolExecutor(4, "bodies")


def read_json(body: bytes) -> Any:
    """What a body says; it is counted first, in a hundredth of the time that reading takes.

    Raises:
        ApiError: it is not JSON, or has too many values.
    """
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    count = plain.count(b'"') // 2
    if count <= MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        count = max(count, sum(map(outside.count, (b",", b"[", b"{"))))
    if count > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES:,} values")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not JSON: it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is JSON that is too deep, or has too long a number") from None


async def on_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` gives, on one of the threads for bodies."""
    return await asyncio.get_running_loop().run_in_executor(_readers, function, *args)


class BodyRoute(APIRoute):
    """A route that is given a body, if it wants one, which has been read and checked; see above."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind = self.body_field and self.body_field.field_info.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return handle

        async def check_and_handle(request: Request) -> Response:
            return await handle(_Checked(request, kind))

        return check_and_handle


class _Checked(Request):
    """A request whose JSON is a body of this kind."""

    def __init__(self, request: Request, kind: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> Any:
        body = await self.body()
        if len(body) > SMALL:
            return await on_thread(_check, self._kind, body)
        return _check(self._kind, body)


def _check(kind: type[BaseModel], body: bytes) -> BaseModel:
    """`ApiError` for whatever is wrong: of all else, FastAPI says that it cannot parse it."""
    value = read_json(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise as_api_error(RequestValidationError(errors)) from None
