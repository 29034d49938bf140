"""Access control: keys, host names, origins; limits on the size and time of bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import Callable, Hashable
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http import static
from radixcache.runtime.server.http.errors import ApiError

OPEN_PATHS = {"/health", *static.FILES}
"""Paths that need no key, under any host name."""

BODY_SECONDS = 60.0
"""A request's body must come within this, counted from its head."""

FREE_BYTES, MAX_LARGE = 1 << 20, 4
"""Bytes of any body that find room; how many of the largest bodies find it besides, of which one
client may have half."""

_TOO_LARGE, _CLOSE = "the request's body is larger than {} bytes", {"Connection": "close"}
_ADMINISTRATES = "radixcache.administrates"
_is_of_a_proxy = re.compile(
    r"forwarded|-?ip$|^via$|^cf-|^x-(real|scheme|orig|proxy|envoy|amzn)"
).search


class Access:
    """Middleware that admits requests, marks an administrator's, and refuses large bodies.

    Any web page can make a browser send requests. Two headers give them away:

    - `Origin` is the page's. It must be the server's own, a name in `ServerArgs.host` or
      `allowed_hosts`, or one of `ServerArgs.allowed_origins`.
    - `Host` is the page's name if that was made to lead here (DNS rebinding). A request without a
      key must therefore name `localhost`, an IP address, or a name in `ServerArgs.host` or
      `allowed_hosts`. A page cannot know a key.

    Administration needs the admin key. A server without any key lets requests of its own machine
    administrate, except those of pages of another origin.
    """

    def __init__(self, app: ASGIApp, options: ServerArgs) -> None:
        self._app = app
        self._options = options
        self._held = Counter[Hashable]()
        """Bytes of large bodies by client, until their requests end: what they say is kept."""
        names = filter(None, [options.host, *options.allowed_hosts])
        self._names = {name.lower() for name in names if not _is_address(name)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET is; uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        headers, limit = Headers(scope=scope), self._options.max_body_size
        try:
            scope[_ADMINISTRATES] = self._admit(scope, headers)
            if "content-length" in headers and "transfer-encoding" in headers:
                # Parsers disagree where such a body ends: request smuggling (RFC 9112, 6.3).
                message = "Content-Length and Transfer-Encoding exclude each other"
                raise ApiError(400, message, headers=_CLOSE)
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) > limit:
                raise ApiError(413, _TOO_LARGE.format(limit))
        except ApiError as error:
            await error.response_at(scope["path"])(scope, receive, send)
            return
        client, size = (scope.get("client") or [None])[0], 0

        def hold(more: int) -> None:
            nonlocal size
            size += more
            self._held[client] += more
            most = MAX_LARGE * limit
            if self._held[client] > most // 2 or self._held.total() > most:
                self._held[client] -= size  # at once: its answer may wait for the body's rest
                size = 0
                raise ApiError(503, "too many large bodies are being answered: try again")

        try:
            await self._app(scope, _bounded(receive, limit, hold), send)
        finally:
            self._held[client] -= size
            self._held += Counter()  # drops zeros

    def _admit(self, scope: Scope, headers: Headers) -> bool:
        """Whether the request may administrate; `ApiError` if it is not admitted."""
        host, options = headers.get("host", "").lower(), self._options
        is_foreign = False
        if (origin := headers.get("origin")) is not None:
            page = origin.partition("://")[2].lower()  # "" for "null"
            is_foreign = not page or (page != host and _host_name(page) not in self._names)
            if is_foreign and {origin, "*"}.isdisjoint(options.allowed_origins):
                raise ApiError(403, f"web pages of {origin!r} may not use this server")
        keys, name = _keys(headers), _host_name(host)
        if _has(keys, options.admin_key):
            return True
        if scope["path"] not in OPEN_PATHS:
            if options.api_key is not None:
                if not _has(keys, options.api_key):
                    raise ApiError.unauthorized("a valid API key")
            elif name != "localhost" and name not in self._names and not _is_address(name):
                raise ApiError(
                    403,
                    f"the server is not known as {name!r}: start it with --allowed-hosts and "
                    "that name, or with keys",
                )
        if options.api_key is not None or options.admin_key is not None or is_foreign:
            return False
        # A proxy on this machine is local, but its clients need not be.
        forwarded = any(map(_is_of_a_proxy, headers))
        client = scope.get("client")
        return client is not None and _is_local(client[0]) and _is_local(name) and not forwarded


def _bounded(receive: Receive, limit: int, hold: Callable[[int], None]) -> Receive:
    """Receives a body of at most `limit` bytes, within `BODY_SECONDS` from now. `hold` is told of
    bytes behind the first `FREE_BYTES`."""
    loop, size, is_whole = asyncio.get_running_loop(), 0, False
    deadline = loop.time() + BODY_SECONDS

    async def receive_bounded() -> Message:
        nonlocal size, is_whole
        if is_whole:  # the next message says that the client has hung up
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), deadline - loop.time())
        except asyncio.TimeoutError:
            late = f"the request's body did not come within {BODY_SECONDS:g} seconds"
            raise ApiError(408, late) from None
        except asyncio.CancelledError:  # the server shuts down
            raise ApiError(503, "the server is shutting down") from None
        is_whole = not message.get("more_body", False)
        before, size = size, size + len(message.get("body", b""))
        if size > limit:
            raise ApiError(413, _TOO_LARGE.format(limit))
        if size > FREE_BYTES:
            hold(size - max(before, FREE_BYTES))
        return message

    return receive_bounded


def _require_administrator(request: Request) -> None:
    if not request.scope[_ADMINISTRATES]:
        if request.app.state.context.options.admin_key is not None:
            raise ApiError.unauthorized("the server's admin key")
        raise ApiError(
            403,
            "the cache and the metrics of all clients are for the server's administrator: start it "
            "with --admin-key and send that key; a server without any key shows them to its own "
            "machine only",
        )


ADMINISTRATOR = Depends(_require_administrator)
"""Dependency of routes that show or change other clients' data: 401 or 403."""


def _keys(headers: Headers) -> list[bytes]:
    """The bearer token, and the `x-api-key` of Anthropic's clients."""
    scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
    # The scheme is case-insensitive (RFC 9110, 11.1).
    bearer = key.strip() if scheme.lower() == b"bearer" else b""
    return [bearer, headers.get("x-api-key", "").encode("latin-1").strip()]


def _has(keys: list[bytes], wanted: str | None) -> bool:
    return wanted is not None and any(hmac.compare_digest(key, wanted.encode()) for key in keys)


def _host_name(netloc: str) -> str:
    """The name or address in "name:port"; "" if it is anything else."""
    if not {*netloc}.isdisjoint("@/?#"):
        return ""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def _is_local(name: str) -> bool:
    """Whether a name leads to the machine itself, as 0.0.0.0 and :: do, too."""
    if name == "localhost" or not _is_address(name):
        return name == "localhost"
    return ip_address(name).is_loopback or ip_address(name).is_unspecified
