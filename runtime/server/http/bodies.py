"""Reads the bodies of requests, large ones on threads: they hold up nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from radixcache.runtime.server.http.errors import ApiError

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

        async def read_and_handle(request: Request) -> Response:
            if _is_json(request.headers.get("content-type")):
                body = await request.body()
                if len(body) > SMALL:
                    request = _Read(request, body, await on_thread(_check, kind, body))
                elif body:
                    request = _Read(request, body, _check(kind, body))
            return await handle(request)

        return read_and_handle


class _Read(Request):
    def __init__(self, request: Request, body: bytes, checked: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._checked = checked

    async def json(self) -> Any:
        return self._checked


def _check(kind: type[BaseModel], body: bytes) -> BaseModel:
    value = read_json(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(errors) from None


def _is_json(content_type: str | None) -> bool:
    message = Message()
    message["content-type"] = content_type or ""
    kind, _, subtype = message.get_content_type().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
