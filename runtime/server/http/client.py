"""Asks a running server, with the standard library alone."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from radixcache.errors import InvalidRequest

SECONDS = 60
"""How long the client waits for a silent server."""

MOST = 1 << 26
"""Bytes of an answer: 64 MiB, more than any prompt's explanation has."""


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would send the key to a server that the user did not name."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = build_opener(_NoRedirects)


def post(url: str, path: str, body: dict[str, Any], api_key: str) -> dict[str, Any]:
    """The JSON object with which the server at `url`, which may end in `/v1`, answers.

    Args:
        api_key: "" for none.

    Raises:
        InvalidRequest: no server answers, or it answers with an error or no JSON object.
    """
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise InvalidRequest(f"a server's address is like http://127.0.0.1:8000, not {url!r}")
    if not api_key.isprintable():
        raise InvalidRequest("the API key must be one line that a header can hold")
    headers: dict[str, Any] = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}".encode()
    try:
        request = Request(f"{root}{path}", json.dumps(body).encode(), headers)
        with _OPENER.open(request, timeout=SECONDS) as response:
            text = response.read(MOST)
    except HTTPError as error:
        raise InvalidRequest(f"{root}{path} answers {error.code}: {_message(error)}") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        detail = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise InvalidRequest(f"no server answers at {root}: {detail}") from None
    except ValueError as error:  # the address is malformed, or the key is no Unicode
        raise InvalidRequest(f"cannot ask {root}{path}: {error}") from None
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise InvalidRequest(f"what {root}{path} answers is no JSON object")
    return answer


def _message(error: HTTPError) -> str:
    """The message of an error in OpenAI's shape, else HTTP's phrase for its status."""
    try:
        return str(json.loads(error.read(MOST))["error"]["message"])
    except (OSError, HTTPException, ValueError, RecursionError, LookupError, TypeError):
        return error.reason
