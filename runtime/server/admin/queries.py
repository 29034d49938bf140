"""Refuses unknown query parameters, as unknown fields of a body are refused."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from radixcache.runtime.server.http.errors import ApiError

_OF_CLIENTS = {"beta", "api-version"}
"""Parameters that Anthropic's and Azure's clients add to every request."""


def _check(request: Request) -> None:
    route: Any = request.scope["route"]
    known = _OF_CLIENTS | {parameter.alias for parameter in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise ApiError(400, f"there is no query parameter {name[:100]!r} here", name[:100])


QUERY = Depends(_check)
"""Dependency of routes: 400 for a query parameter that would be ignored."""
