"""Named prefixes: texts whose KV stays, for prompts that begin with them by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixcache.base import Tokens, TokensLike, as_tokens
from radixcache.errors import InvalidRequest, PinError
from radixcache.runtime.engine import Engine
from radixcache.runtime.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class NamedPrefix:
    """A pinned prefix.

    Attributes:
        expires: when it is unpinned, in the seconds of `time.monotonic`; None is never.
    """

    name: str
    tokens: Tokens
    cache_salt: str | None
    expires: float | None


class NamedPrefixes:
    """The named prefixes of one engine. A prefix whose time is over is gone at the next call.

    Args:
        now: seconds from any fixed moment.
    """

    def __init__(self, engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now = now
        self._prefixes: dict[str, NamedPrefix] = {}

    def pin(
        self,
        name: str,
        tokens: TokensLike,
        *,
        lifetime: float | None = None,
        cache_salt: str | None = None,
    ) -> NamedPrefix:
        """Compute what is not cached of `tokens`, and keep it cached.

        Runs the engine until that is done, other requests included.

        Raises:
            PinError: the name is taken, or the pins would exceed the cache's budget.
            InvalidRequest: the tokens are no prompt that the engine could run.
        """
        self._drop_expired()
        if name in self._prefixes:
            raise PinError(f"a prefix named {name!r} is pinned already")
        if lifetime is not None and not lifetime > 0:
            raise InvalidRequest(f"lifetime must be above 0 seconds, not {lifetime!r}")
        tokens = as_tokens(tokens)
        engine = self._engine
        one_token = SamplingParams(temperature=0, max_tokens=1)
        request = engine.add_request(tokens, one_token, namespace=cache_salt)
        try:
            while not request.finished:
                engine.step()
        finally:
            engine.abort(request)
        if request.error is not None:
            raise PinError(f"{name!r} cannot be computed: {request.error}")
        engine.cache.pin(name, tokens, cache_salt)
        expires = None if lifetime is None else self._now() + lifetime
        self._prefixes[name] = NamedPrefix(name, tokens, cache_salt, expires)
        return self._prefixes[name]

    def unpin(self, name: str) -> None:
        """Let a prefix be evicted like any other; `PinError` if there is none of that name."""
        del self._prefixes[self[name].name]
        self._engine.cache.unpin(name)

    def __getitem__(self, name: str) -> NamedPrefix:
        """The prefix of that name; `PinError` if there is none."""
        self._drop_expired()
        if name not in self._prefixes:
            raise PinError(f"no prefix named {name!r} is pinned")
        return self._prefixes[name]

    def list(self) -> list[NamedPrefix]:
        """All of them, oldest first."""
        self._drop_expired()
        return [*self._prefixes.values()]

    def extend(self, name: str, tokens: TokensLike) -> Tokens:
        """The tokens of the prefix, and `tokens` after them."""
        return np.concatenate((self[name].tokens, as_tokens(tokens)))

    def _drop_expired(self) -> None:
        now = self._now()
        for prefix in [*self._prefixes.values()]:
            if prefix.expires is not None and prefix.expires <= now:
                del self._prefixes[prefix.name]
                self._engine.cache.unpin(prefix.name)
