"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; and in Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from radixcache.errors import (
    Busy,
    ContextExceeded,
    EngineFailed,
    EngineStopped,
    LeaseError,
    PinError,
    RadixCacheError,
)

MAX_MESSAGE = 1000
"""Characters."""

_TOO_LONG = "context_length_exceeded"
_KINDS = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:  # some repeat what the client sent
            message = f"{message[:MAX_MESSAGE]} ..."
        if status in (429, 503):
            headers = headers or {"Retry-After": "1"}
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.kind = _KINDS.get(status, "invalid_request_error")
        self.param = param
        self.code = "rate_limit_exceeded" if status == 429 else code

    def __str__(self) -> str:
        return self.message

    @classmethod
    def unauthorized(cls, key: str) -> ApiError:
        """The key is missing or wrong; `key` names it."""
        return cls(
            401,
            f"{key} is needed: send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    @property
    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind}
        return {"error": {**fields, "param": self.param, "code": self.code}}

    def body_at(self, path: str) -> dict[str, Any]:
        """The error in the shape of the API at this path."""
        if not path.startswith(("/v1/messages", "/v1/v1/messages", "/messages")):
            return self.body
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_KINDS.get(self.status, other)
        # At these first words Claude Code summarises the conversation.
        too_long = "prompt is too long: " * (self.code == _TOO_LONG)
        error: dict[str, Any] = {"type": kind, "message": too_long + self.message}
        if self.param == "thread":  # Anthropic's client then goes on without one
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return {"type": "error", "error": error}

    def response_at(self, path: str) -> JSONResponse:
        return JSONResponse(self.body_at(path), self.status, headers=dict(self.headers or {}))


def as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case LeaseError() | PinError():
            return ApiError(409, str(error))
        case ContextExceeded():  # at this code, clients cut their prompts
            return ApiError(400, str(error), code=_TOO_LONG)
        case EngineFailed():
            # Its own text may reveal other requests of the step.
            return ApiError(500, f"the engine failed: {type(error.__cause__).__name__}")
        case EngineStopped() | Busy():
            return ApiError(503, str(error))
        case RadixCacheError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _describe_validation(error)
        case HTTPException(status_code=405, headers={"Allow": methods}):
            return ApiError(405, f"the method must be {methods}", headers=error.headers)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            return ApiError(500, f"the server failed: {type(error).__name__}")


def _describe_validation(error: RequestValidationError) -> ApiError:
    if isinstance(error.body, bytes):  # FastAPI parses bodies of JSON's content type alone
        return ApiError(400, "the body must be JSON: send 'Content-Type: application/json'")
    errors = error.errors()
    field = [*takewhile(lambda part: not _is_branch(part), errors[0]["loc"])]
    # A value of several possible types has an error for each; the deepest one says most.
    alike = [other for other in errors if [*other["loc"][: len(field)]] == field]
    first, *others = _furthest(alike)
    place = first["loc"][1:] if first["loc"][:1] == ("query",) else first["loc"]
    names = [str(part) for part in place if part != "body" and not _is_branch(part)]
    where, message = ".".join(names), first["msg"].removeprefix("Value error, ")
    for other in dict.fromkeys(e["msg"] for e in others if e["msg"] != first["msg"]):
        message += f" or {other.removeprefix('Input should be ')}"
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message)
    return ApiError(400, f"{where}: {message}" if where else message, where or None)


def _furthest(errors: Sequence[Any]) -> list[Any]:
    """The deepest error, or all of the deepest that are about a wrong type."""
    ranks = [(len(e["loc"]), not e["type"].endswith("_type")) for e in errors]
    best = max(ranks)
    found = [error for error, rank in zip(errors, ranks, strict=True) if rank == best]
    return found[:1] if best[1] else found


def _is_branch(part: int | str) -> bool:
    """Whether a part of a location is pydantic's name for a type, such as `list[TextPart]`."""
    return isinstance(part, str) and "[" in part


_OTHERS = {path: ["/v1/cache/flush"] for path in ("/reset_prefix_cache", "/flush_cache")}
"""Our routes under vLLM's and SGLang's names."""


def install(app: FastAPI) -> None:
    """Answer every error of `app` in the shape of the API of its path."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        path = request.url.path
        if type(error) is HTTPException and error.status_code == 404:
            paths = app.openapi()["paths"]
            near = _OTHERS.get(path) or get_close_matches(path[:64], paths, 1, 0.75)
            hint = f": did you mean {near[0]}?" if near else ""
            error = ApiError(404, f"there is nothing at {path[:64]!r}{hint}")
        return as_api_error(error).response_at(path)

    for kind in (RadixCacheError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
