"""Which replica a request goes to: where its first token comes soonest, as far as one can tell.

What a replica has to do before that is counted in tokens: those of the prompt that it must compute,
and, a little less, those that were sent there before and are not computed yet. The least sum wins.
There is no threshold between affinity and load, as both are in one unit: a cached prefix attracts
requests until the queue there is longer than computing the prefix elsewhere, or the replica full:
a request that finds no memory there, or too many that run, waits for answers to end.

What a replica has cached is not asked but remembered, in a tree for each: a `GhostIndex` of as many
tokens as the replica's KV holds, which evicts as the replica does. A prompt is
remembered when its replica is chosen, before it is computed, so that those that come right after
know where their prefix will be; an answer when its request ends. A replica with a tier below its
KV memory has a second tree, of both sizes: what only that one has is loaded, at a lower cost.

One `Router` decides for all requests of a deployment. Several that do not know of each other spread
each prefix over as many replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from radixcache.base import Tokens, TokensLike, as_tokens
from radixcache.errors import InvalidRequest
from radixcache.ghost import GhostIndex
from radixcache.nodes import common_length

QUEUED = 0.9
"""What a queued token weighs. At 1 the second of two requests with one stem leaves for an idle
replica, to save the few tokens of the first that are not stem, and computes the stem again; and a
part of the queue is computed by now. From 0.5 down load counts too little."""

LOADED = 0.05
"""What a token weighs that is loaded from a replica's disk: 3,000 of a Llama of 33 M took 1/27 of
the time of computing them (two cores, AVX-512), and a larger model's take less."""

SHORT = 4
"""What a token weighs that has no room: it waits for answers to end, not for prompts. A step that
generates a token for each of 64 requests takes as long as some 200 tokens of a prompt."""
ANSWER = 512
"""Tokens of an answer before any has been seen. Better too many: waiting for room takes longest."""


class Standing(NamedTuple):
    """What speaks for and against sending a prompt to one replica.

    Attributes:
        num_tokens: length of the prompt.
        cached_tokens: of these, how many the replica should have cached when its turn comes; those
            that it must load count less, by `LOADED`.
        queued_tokens: of other requests, that it has yet to compute.
        requests: sent there and not ended.
        last: when a request was sent there last, in requests; 0 if never.
        short_tokens: of KV by which its memory is too small for this request and those not ended,
            or of the answers that must end before it may run, whichever is more.
        cost: tokens to compute before the first token of the answer, as far as that matters.
    """

    replica: Hashable
    num_tokens: int
    cached_tokens: int
    queued_tokens: int
    requests: int
    last: int
    short_tokens: int = 0
    cost: float = 0.0


preference = attrgetter("cost", "requests", "last")
"""The key of a standing by which the best replica's is least.

Those of equal cost take turns: the one with fewest requests, then the one asked longest ago.
"""


@dataclass(eq=False)
class _Replica:
    """What the router knows of one replica."""

    name: Hashable
    ghost: GhostIndex
    max_num_seqs: int
    with_lower: GhostIndex | None = None
    """What it has in its KV memory or in the tier below, of prompts without a salt."""
    queued_tokens: int = 0
    requests: int = 0
    last: int = 0
    prompts: list[tuple[int, bytes]] = field(default_factory=list)
    """Of the requests, after the hash of the salt; sorted: those most alike are neighbours."""
    held_tokens: int = 0
    """Of these prompts; what they have in common counts once."""

    def standing(self, tokens: Tokens, salt: Hashable, answer: float) -> Standing:
        """How it stands for a prompt, if each answer has `answer` tokens. O(len(tokens))."""
        count, cached = len(tokens), self.ghost.match(tokens, salt)
        requests = self.requests + 1
        held = self.held_tokens + count - cached + int(requests * answer)
        if self.with_lower is not None and salt is None:
            loaded = max(0, self.with_lower.match(tokens) - cached)
            cached += int((1 - LOADED) * loaded)
        waited = int((requests - self.max_num_seqs) * answer)
        short = max(0, held - self.ghost.pool.num_pages, waited)
        head = cached if 10 * cached >= count else 0
        cost = count - head + QUEUED * self.queued_tokens + SHORT * short
        load = self.queued_tokens, self.requests, self.last
        return Standing(self.name, count, cached, *load, short, cost)

    def remember(self, tokens: Tokens, salt: Hashable) -> None:
        """It will have computed these. O(len(tokens)), amortised."""
        self.ghost.remember(tokens, salt)
        if self.with_lower is not None and salt is None:
            self.with_lower.remember(tokens)

    def hold(self, tokens: Tokens, salt: Hashable, sign: int) -> None:
        """A request comes (1) or goes (-1). O(len(tokens) · log(requests))."""
        prompt, shared = (hash(salt), tokens.tobytes()), 0
        at = bisect_left(self.prompts, prompt)
        self.prompts[at : at + (sign < 0)] = []
        for named, other in self.prompts[max(0, at - 1) : at + 1]:
            if named == prompt[0] and (n := min(len(tokens), len(other) // 4)):
                same = common_length(tokens[:n], np.frombuffer(other, np.int32, n))
                shared = max(shared, same)
        self.prompts[at:at] = [prompt] * (sign > 0)
        self.held_tokens += sign * (len(tokens) - shared)
        self.requests += sign


@dataclass
class _Booking:
    """A request on its replica."""

    replica: Hashable
    tokens: Tokens
    salt: Hashable
    to_compute: int
    """Tokens that it adds to the replica's queue; 0 from its first token on."""


class Router:
    """Orders replicas, and keeps the books about what is cached and queued on each.

    For one event loop, or one thread: nothing here waits, and nothing is locked. Tokens are best
    given as int32 arrays, since lists are converted in each call; they are kept, not copied.
    A salt (`cache_salt`) is a namespace: prefixes are found only under the one they came with.
    Keys of requests are the caller's, one for each request in flight.

    >>> router = Router()
    >>> router.add("a", kv_tokens=100)
    >>> router.add("b", kv_tokens=100)
    >>> router.book("first", "a", [1, 2, 3, 4, 5]).cached_tokens
    0
    >>> router.order([6, 7, 8])
    ['b', 'a']
    >>> router.started("first")
    >>> router.release("first", [10, 11])
    >>> router.order([1, 2, 3, 4, 5, 10, 12])
    ['a', 'b']
    """

    def __init__(self) -> None:
        self._replicas: dict[Hashable, _Replica] = {}
        self._bookings: dict[Hashable, _Booking] = {}
        self._count = 0
        self._answer: float = ANSWER  # the mean of what has ended, the last ones most

    def add(
        self, replica: Hashable, kv_tokens: int, max_num_seqs: int = 64, lower_tokens: int = 0
    ) -> None:
        """A replica has joined, or forgotten all it had cached.

        Args:
            kv_tokens: that fit its KV memory. If that is not known, guess high: too large a tree
                routes better than one too small.
            max_num_seqs: requests that run there at the same time.
            lower_tokens: that fit the tier below.

        Raises:
            InvalidRequest: `kv_tokens` or `max_num_seqs` is below 1; nothing has changed.
        """
        if max_num_seqs < 1:
            raise InvalidRequest(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        ghost = GhostIndex(kv_tokens)  # which refuses bad sizes
        self.forget(replica)
        with_lower = GhostIndex(kv_tokens + lower_tokens) if lower_tokens else None
        self._replicas[replica] = _Replica(replica, ghost, max_num_seqs, with_lower)

    def forget(self, replica: Hashable) -> None:
        """A replica has left, if it was there, and its bookings with it. O(requests in flight)."""
        if self._replicas.pop(replica, None) is not None:
            for key in [k for k, b in self._bookings.items() if b.replica == replica]:
                del self._bookings[key]

    def standings(self, tokens: TokensLike, salt: Hashable = None) -> list[Standing]:
        """What each replica would have to do for a prompt. Changes nothing. O(replicas · len)."""
        tokens = as_tokens(tokens)
        return [r.standing(tokens, salt, self._answer) for r in self._replicas.values()]

    def order(self, tokens: TokensLike, salt: Hashable = None) -> list[Hashable]:
        """All replicas, the best first. Changes nothing."""
        return [s.replica for s in sorted(self.standings(tokens, salt), key=preference)]

    def book(
        self, key: Hashable, replica: Hashable, tokens: TokensLike, salt: Hashable = None
    ) -> Standing:
        """Send request `key` to `replica`; a request that was booked before moves there.

        Returns:
            How the replica stood for the request.

        Raises:
            InvalidRequest: there is no such replica, or `tokens` are none, or `salt` cannot be
                hashed; nothing has changed.
        """
        if (booked := self._replicas.get(replica)) is None:
            raise InvalidRequest(f"there is no replica {replica!r}")
        tokens = as_tokens(tokens)
        try:
            hash(salt)
        except TypeError:
            raise InvalidRequest(f"a salt must be hashable, not {repr(salt)[:80]}") from None
        self.release(key)
        standing = booked.standing(tokens, salt, self._answer)
        to_compute = len(tokens) - standing.cached_tokens
        self._bookings[key] = _Booking(replica, tokens, salt, to_compute)
        self._count += 1
        booked.last = self._count
        booked.hold(tokens, salt, 1)
        booked.queued_tokens += to_compute
        booked.remember(tokens, salt)
        return standing

    def started(self, key: Hashable) -> None:
        """The first token has come: the prompt is computed. No error if `key` is not booked."""
        booking = self._bookings.get(key)
        if booking is not None:
            self._replicas[booking.replica].queued_tokens -= booking.to_compute
            booking.to_compute = 0

    def release(self, key: Hashable, *answers: TokensLike) -> None:
        """The request has ended, well or not; what it had computed stays cached on its replica.

        No error if `key` is not booked: it may have ended before, or its replica with it.

        Args:
            answers: the tokens generated so far, one for each completion; a last one gets no KV.
        """
        self.started(key)
        booking = self._bookings.pop(key, None)
        if booking is None:
            return
        replica = self._replicas[booking.replica]
        replica.hold(booking.tokens, booking.salt, -1)
        if answers:
            self._answer += (sum(map(len, answers)) - self._answer) / 32
        for answer in answers:
            if len(answer) > 1:
                text = np.concatenate((booking.tokens, as_tokens(answer)[:-1]))
                replica.remember(text, booking.salt)

    def check(self) -> None:
        """Verify that bookings and sums agree, and each tree. O(everything)."""
        for name, replica in self._replicas.items():
            booked = [b for b in self._bookings.values() if b.replica == name]
            assert replica.requests == len(booked), "requests are miscounted"
            assert replica.queued_tokens == sum(b.to_compute for b in booked), "so are tokens"
            prompts = sorted((hash(b.salt), b.tokens.tobytes()) for b in booked)
            assert replica.prompts == prompts, "prompts are lost or left"
            assert 0 <= replica.last <= self._count
            assert replica.ghost.idle, "a lease was left"
            replica.ghost.check()
        assert {b.replica for b in self._bookings.values()} <= self._replicas.keys()
