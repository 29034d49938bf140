"""Reads the bodies of requests, large ones on threads: they hold up nobody else."""

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
"""Bytes of a body that is read at once, and waits for no larger one."""

_readers = ThreadPoolExecutor(2, "bodies")
"""Each takes its turns with the engine's thread, and for long where C reads or compares."""

_rests = threading.local()

_LARGE, _TIDY_SECONDS = 1 << 20, 0.5
_is_tidying = False
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc's


def read_json(body: bytes) -> Any:
    """What a body says; it is counted first, in a hundredth of the time that reading takes.

    Raises:
        ApiError: it is not JSON, or has too many values.
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
    """What `function` gives, on one of the threads for bodies."""
    return await asyncio.get_running_loop().run_in_executor(_readers, _rested, function, *args)


def _rested(function: Callable[..., Any], *args: Any) -> Any:
    """Not before the thread has rested twice as long as it was busy last: others get on then."""
    time.sleep(max(0.0, getattr(_rests, "end", 0.0) - time.monotonic()))
    began = time.monotonic()
    try:
        return function(*args)
    finally:
        now = time.monotonic()
        _rests.end = now + 2 * (now - began)


def _tidy_later() -> None:
    """Give back what large bodies have taken, in some time, when others have ended, too:
    templates leave circles behind, and malloc keeps what it has."""
    global _is_tidying

    def tidy() -> None:
        global _is_tidying
        _is_tidying = False
        _readers.submit(_rested, lambda: (gc.collect(), _trim(0)))

    if not _is_tidying:
        _is_tidying = True
        asyncio.get_running_loop().call_later(_TIDY_SECONDS, tidy)


class BodyRoute(APIRoute):
    """A route that is given a body, if it wants one, which has been read and checked; see above."""

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
    """A request whose JSON is a body of this kind."""

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
        self._body = b""  # nobody asks for it again, and a request lives as long as its stream
        try:
            if isinstance(checked, ApiError):
                raise checked
            return checked
        finally:
            del checked  # which else keeps itself, and all in the frames that it passes


def _check(kind: type[BaseModel], body: bytes) -> BaseModel | ApiError:
    """`ApiError` for whatever is wrong: of all else, FastAPI says that it cannot parse it."""
    try:
        return kind.model_validate(read_json(body))
    except (ApiError, ValidationError) as error:
        return _alone(error)


def _alone(error: ApiError | ValidationError) -> ApiError:
    """What an error says, without the frames that hold all that was read, and the error with it:
    they would stay until garbage is collected some day."""
    if isinstance(error, ApiError):
        return ApiError(error.status, error.message)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
    return as_api_error(RequestValidationError(errors))
