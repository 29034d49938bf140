"""Gives each request an id, and logs a line of JSON once it is answered."""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixcache.runtime.engine.stream import Stream
from radixcache.runtime.server.http.errors import as_api_error

REQUEST_ID = "X-Request-Id"

jobs_of_task: ContextVar[list[Stream]] = ContextVar("jobs_of_task")
"""The list to which a task's submissions are added: the jobs of one HTTP request."""

_log = logging.getLogger(__name__)


class RequestLog:
    """Gives every answer, also errors and streams, the id of its request.

    The client's id is kept if it is 1 to 128 letters, digits and ``._:-``. The log has no texts,
    keys or queries.

    Args:
        access_log: print a line for each request, once its answer is sent.
    """

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", request_id):
            request_id = uuid4().hex
        jobs: list[Stream] = scope.setdefault("radixcache.jobs", [])  # a replica reads it, too
        jobs_of_task.set(jobs)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # outer middleware would not know the id
            _log.error("request %s failed", request_id)
            if not status:
                await as_api_error(error).response_at(scope["path"])(scope, receive, send_with_id)
            raise
        finally:
            if self._access_log:
                _print_line(scope, request_id, status, time.perf_counter() - start, jobs)


def _print_line(
    scope: Scope, request_id: str, status: int, seconds: float, jobs: list[Stream]
) -> None:
    """`status` is 0 if the client hung up before an answer."""
    line: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "request_id": request_id,
        "client": scope["client"] and scope["client"][0],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_s": round(seconds, 6),
    }
    if jobs:
        requests = [request for job in jobs for request in job.requests]
        line["prompt_tokens"] = sum(len(request.prompt_token_ids) for request in requests)
        line["cached_tokens"] = sum(request.sequences[0].cached_tokens for request in requests)
        line["generated_tokens"] = sum(len(s.generated) for r in requests for s in r.sequences)
    with suppress(OSError, ValueError):  # the reader of standard output has left
        print(json.dumps(line), flush=True)
