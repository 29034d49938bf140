"""Reads the bodies of requests; large ones on threads, so that others need not wait."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from radixcache.runtime.server.http.errors import ApiError, as_api_error
from radixcache.runtime.tokens.tool_calls import TOO_MANY, has_too_many_values

SMALL = 4096
"""Bytes up to which a body is read on the event loop, without waiting for larger ones."""

_readers = ThreadPoolExecutor(2, "bodies")
"""They compete with the engine's thread for the GIL, which C code holds for long."""

_rests = threading.local()

_LARGE, _TIDY_SECONDS = 1 << 20, 0.5
_is_tidying = False
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc's


def read_json(body: bytes) -> Any:
    """The value of a JSON body. Values are counted first, in a hundredth of the time.

    Raises:
        ApiError: the body is not JSON, or has too many values.
    """
    if has_too_many_values(body):
        raise ApiError(400, f"the body has {TOO_MANY}")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not JSON: it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is JSON that is too deep, or has too long a number") from None


async def on_thread(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`, on one of the threads for bodies."""
    return await asyncio.get_running_loop().run_in_executor(_readers, _paced, function, *args)


def _paced(function: Callable[..., Any], *args: Any) -> Any:
    """Rest twice as long as the last call took, so that other threads get on, then call."""
    time.sleep(max(0.0, getattr(_rests, "end", 0.0) - time.monotonic()))
    began = time.monotonic()
    try:
        return function(*args)
    finally:
        now = time.monotonic()
        _rests.end = now + 2 * (now - began)


def _tidy_later() -> None:
    """Soon free the memory of large bodies, of several together: templates leave reference cycles,
    and malloc keeps freed memory."""
    global _is_tidying

    def tidy() -> None:
        global _is_tidying
        _is_tidying = False
        _readers.submit(_paced, lambda: (gc.collect(), _trim(0)))

    if not _is_tidying:
        _is_tidying = True
        asyncio.get_running_loop().call_later(_TIDY_SECONDS, tidy)


class BodyRoute(APIRoute):
    """A route whose JSON body is read and checked as above."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind = self.body_field and self.body_field.field_info.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return handle

        async def check_and_handle(request: Request) -> Response:
            checked = _Checked(request, kind)
            try:
                return await handle(checked)
            finally:
                if checked.size > _LARGE:
                    _tidy_later()

        return check_and_handle


class _Checked(Request):
    """A request whose `json` is a checked body."""

    def __init__(self, request: Request, kind: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind
        self.size = 0
        """Bytes of the body, once it is read."""

    async def json(self) -> Any:
        self.size = len(await self.body())
        if self.size > SMALL:
            checked = await on_thread(_check, self._kind, self._body)
        else:
            checked = _check(self._kind, self._body)
        self._body = b""  # a request lives as long as its stream, and this is not read again
        try:
            if isinstance(checked, ApiError):
                raise checked
            return checked
        finally:
            del checked  # else the error's traceback keeps it and its frames alive


def _check(kind: type[BaseModel], body: bytes) -> BaseModel | ApiError:
    """The checked body or an `ApiError`, the one kind whose message FastAPI passes on."""
    try:
        return kind.model_validate(read_json(body))
    except (ApiError, ValidationError) as error:
        return _without_traceback(error)


def _without_traceback(error: ApiError | ValidationError) -> ApiError:
    """The error without its traceback, whose frames hold the body and the error itself: that cycle
    would live until the next garbage collection."""
    if isinstance(error, ApiError):
        return ApiError(error.status, error.message)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
    return as_api_error(RequestValidationError(errors))
