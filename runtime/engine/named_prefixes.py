"""Named prefixes: texts whose KV stays, for prompts that begin with them by name."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from radixcache.errors import InvalidRequest, PinError
from radixcache.runtime.kv_offload.notes import PrefixNote
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.tokens import Tokens, TokensLike, as_tokens

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.engine.engine import Engine

Messages = list[Message]

MAX_PREFERRED = 256
"""Preferred prefixes of one salt: each new one is compared with all others."""


@dataclass(frozen=True, eq=False)
class NamedPrefix:
    """A pinned prefix.

    Attributes:
        expires: when it is unpinned, in seconds of `time.monotonic`; None is never.
        yields: it is unpinned as soon as a request or another pin needs its pages.
        messages: the messages that it was rendered from; None if it was given as text.
    """

    name: str
    tokens: Tokens
    cache_salt: str | None
    expires: float | None
    yields: bool = False
    messages: Messages | None = None


class NamedPrefixes:
    """The named prefixes of one engine. A prefix that has expired is gone at the next call.

    Each salt, and no salt, has names of its own, and `Pins.share` pages to pin. To pin a prefix,
    call `prepare`, run the engine until that request is finished, and call `keep`, all on the
    engine's thread.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now = now
        self._prefixes: dict[tuple[str | None, str], NamedPrefix] = {}
        engine.scheduler.on_no_room = self.drop_yielding

    def prepare(
        self,
        name: str,
        tokens: TokensLike,
        *,
        lifetime: float | None = None,
        cache_salt: str | None = None,
        client: Hashable = None,
    ) -> Request:
        """Queue the request that computes the prefix for `keep`.

        Raises:
            PinError: the salt has that name for other tokens.
            InvalidRequest: the engine cannot run the tokens as a prompt.
        """
        self.drop_expired()
        self._has(name, as_tokens(tokens), cache_salt)
        if lifetime is not None and not lifetime > 0:
            raise InvalidRequest(f"lifetime must be above 0 seconds, not {lifetime!r}")
        self.make_room(len(as_tokens(tokens)) + 1)
        one_token = SamplingParams(temperature=0, max_tokens=1)
        return self._engine.add_request(tokens, one_token, namespace=cache_salt, client=client)

    def keep(
        self,
        name: str,
        request: Request,
        *,
        lifetime: float | None = None,
        messages: Messages | None = None,
    ) -> NamedPrefix:
        """Pin the prompt of a finished request of `prepare`; its lifetime begins, or begins again.

        Raises:
            PinError: the request failed, its KV was evicted in the meantime, the salt has that name
                for other tokens by now, or there are too few pages left to pin.
        """
        if request.error is not None:
            raise PinError(f"{name!r} cannot be computed: {request.error}")
        tokens, cache_salt = request.prompt_token_ids, cast(str | None, request.namespace)
        if not self._has(name, tokens, cache_salt):
            try:
                self._pin(name, tokens, cache_salt)
            except PinError:
                self.drop_yielding()
                self._pin(name, tokens, cache_salt)
        expires = None if lifetime is None else self._now() + lifetime
        prefix = NamedPrefix(name, tokens, cache_salt, expires, messages=messages)
        self._prefixes[cache_salt, name] = prefix
        return prefix

    def _has(self, name: str, tokens: Tokens, cache_salt: str | None) -> bool:
        """Whether the salt has these tokens by that name; `PinError` if it has others."""
        same = self._prefixes.get((cache_salt or None, name))
        if same is not None and not np.array_equal(same.tokens, tokens):
            raise PinError(f"another prefix named {name!r} is pinned already")
        return same is not None

    def prefer(self, tokens: TokensLike, lifetime: float, cache_salt: str | None = None) -> None:
        """Pin cached tokens for `lifetime` seconds, but only while nothing else needs the room.

        No request and no other pin is refused, fails or ends sooner for it. It replaces shorter
        preferred prefixes that it begins with and outlives. Its name is a digest of its tokens. Of
        more than `MAX_PREFERRED`, the one preferred longest ago is dropped.
        """
        tokens, expires = as_tokens(tokens), self._now() + lifetime
        cache_salt = cache_salt or None
        name = f"cache_control.{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}"
        self.drop_expired()
        same = self._prefixes.get((cache_salt, name))
        if same is None:
            try:
                self._pin(name, tokens, cache_salt)
            except PinError:
                return
        elif same.expires is not None:
            expires = max(expires, same.expires)
        self._prefixes.pop((cache_salt, name), None)
        self._prefixes[cache_salt, name] = NamedPrefix(name, tokens, cache_salt, expires, True)
        others = [p for p in self._prefixes.values() if p.yields and p.cache_salt == cache_salt]
        if len(others) > MAX_PREFERRED:
            self._drop(others.pop(0))
        for old in others:
            length = len(old.tokens)
            if length < len(tokens):
                outlived = old.expires is not None and old.expires <= expires
                if outlived and np.array_equal(old.tokens, tokens[:length]):
                    self._drop(old)
        open_sequences = self._engine.scheduler.open
        self.make_room(max((sequence.max_length for sequence in open_sequences), default=0))

    def make_room(self, num_tokens: int) -> None:
        """Drop all preferred prefixes if a sequence of `num_tokens` might not fit beside the pins.

        To be called before a request is added to the engine.
        """
        if any(prefix.yields for prefix in self._prefixes.values()):
            engine = self._engine
            # One page is for a branch in mid-page.
            free = engine.kv_pool.num_pages - engine.cache.pins.num_pages - 1
            if min(num_tokens, engine.model.max_context) > engine.tokens_in(free):
                self.drop_yielding()

    def drop_yielding(self) -> bool:
        """Unpin all preferred prefixes; returns whether there were any."""
        yielding = [prefix for prefix in self._prefixes.values() if prefix.yields]
        for prefix in yielding:
            self._drop(prefix)
        return bool(yielding)

    def unpin(self, name: str, cache_salt: str | None = None) -> None:
        """Let a prefix be evicted like any other; `PinError` if the salt has none of that name."""
        self._drop(self.find(name, cache_salt))

    def find(self, name: str, cache_salt: str | None = None) -> NamedPrefix:
        """The salt's prefix of that name; `PinError` if there is none.

        A cache that was broken has lost its pins: the prefix is pinned again if it is cached again.
        """
        self.drop_expired()
        cache_salt = cache_salt or None
        if (cache_salt, name) not in self._prefixes:
            whose = "without a cache_salt" if cache_salt is None else "with this cache_salt"
            raise PinError(f"no prefix named {name!r} is pinned {whose}")
        prefix = self._prefixes[cache_salt, name]
        if (cache_salt, name) not in self._engine.cache.pins:
            # A pinned state outlives the pages of a cache that was broken; a window does not.
            self._engine.scheduler.planner.unpin(prefix.tokens, cache_salt)
            with suppress(PinError):
                self._pin(name, prefix.tokens, cache_salt)
        return prefix

    def list(self) -> list[NamedPrefix]:
        """The prefixes of all salts, oldest first."""
        self.drop_expired()
        return [*self._prefixes.values()]

    def notes(self) -> Iterable[PrefixNote]:
        """Notes that let a restart pin the unsalted prefixes of `keep` again."""
        since = time.time() - self._now()
        for prefix in self._prefixes.values():
            if prefix.cache_salt is None and not prefix.yields:
                expires = None if prefix.expires is None else prefix.expires + since
                tokens = prefix.tokens.tolist()
                yield PrefixNote(prefix.name, tokens, expires, prefix.messages)

    def extend(self, name: str, tokens: TokensLike, cache_salt: str | None = None) -> Tokens:
        """The tokens of the prefix, and `tokens` after them."""
        return np.concatenate((self.find(name, cache_salt).tokens, as_tokens(tokens)))

    def drop_expired(self) -> None:
        """Unpin the prefixes that have expired. O(prefixes)."""
        now = self._now()
        for prefix in [*self._prefixes.values()]:
            if prefix.expires is not None and prefix.expires <= now:
                self._drop(prefix)

    def _pin(self, name: str, tokens: Tokens, cache_salt: str | None) -> None:
        self._engine.cache.pin(name, tokens, cache_salt)
        self._engine.scheduler.planner.pin(tokens, cache_salt)

    def _drop(self, prefix: NamedPrefix) -> None:
        name, salt = prefix.name, prefix.cache_salt
        del self._prefixes[salt, name]
        if (salt, name) in self._engine.cache.pins:  # else the cache was broken; see `find`
            self._engine.cache.unpin(name, salt)
        self._engine.scheduler.planner.unpin(prefix.tokens, salt)
