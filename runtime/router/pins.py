"""The named prefixes that all replicas have pinned, for those that join later."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from radixcache.runtime.router.prompts import Body
from radixcache.runtime.server.admin.cache import name_of_salt

Key = tuple[str | None, str]
"""A salt's public name, and a prefix's name."""


@dataclass(frozen=True, eq=False)
class Pin:
    """The request that pinned a prefix, and when the pin expires."""

    scope: Scope
    fields: Body
    until: float | None

    @property
    def body(self) -> bytes:
        """The body that pins it on another replica, for the time that is left."""
        left = None if self.until is None else max(1e-3, self.until - time.monotonic())
        return json.dumps({**self.fields, "lifetime": left}).encode()


class Pins:
    """The live pins, by salt and name."""

    def __init__(self) -> None:
        self._pins: dict[Key, Pin] = {}

    def live(self) -> dict[Key, Pin]:
        """All pins that have not expired."""
        now = time.monotonic()
        for key, pin in [*self._pins.items()]:
            if pin.until is not None and pin.until <= now:
                del self._pins[key]
        return {**self._pins}

    def find(self, salt: str | None, name: Any) -> Body | None:
        """The fields of the request that pinned a name."""
        pin = self._pins.get((name_of_salt(salt), str(name)))
        return None if pin is None else pin.fields

    def keep(self, pin: Pin) -> None:
        """Note that all replicas have pinned it."""
        self._pins[key_of(deletion(pin.scope, pin.fields))] = pin
        self.live()  # drops expired pins

    def drop(self, scope: Scope) -> None:
        """Note that all replicas have done a request, which may have deleted a prefix."""
        self._pins.pop(key_of(scope), None)


def deletion(scope: Scope, fields: Body) -> Scope:
    """The request that deletes what a request has pinned."""
    path = f"/v1/prefixes/{fields.get('name')}"
    return {**with_salt(scope, fields), "method": "DELETE", "path": path}


def key_of(scope: Scope) -> Key:
    """The prefix that a client's or the administrator's deletion names."""
    *_, place, name = scope["path"].split("/")
    if place != "prefixes":
        return place, name
    salt = Headers(scope=scope).get("cache-salt")
    return name_of_salt(salt and salt.encode("latin-1").decode(errors="replace")), name


def salt_of(fields: Body) -> str | None:
    """The salt in a body; None if no replica would accept it."""
    salt = fields.get("cache_salt")
    with suppress(UnicodeEncodeError):
        if isinstance(salt, str) and salt.encode():
            return salt
    return None


def with_salt(scope: Scope, fields: Body) -> Scope:
    """The request with its salt in a header, for routes without a body."""
    kept = [(name, value) for name, value in scope["headers"] if name != b"cache-salt"]
    if (salt := salt_of(fields)) is not None:
        kept.append((b"cache-salt", salt.encode()))
    return {**scope, "headers": kept}
