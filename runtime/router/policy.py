"""Estimates which replica would give a request its first token soonest.

A replica's cost is in tokens: prompt tokens that it must compute plus, at a lower weight, tokens of
earlier requests that it has not computed yet. The least sum wins. Affinity and load
need no threshold, as both are in one unit: a cached prefix attracts requests until the queue there
costs more than computing the prefix elsewhere, or the replica is full. A request that finds no
memory there, or too many running requests, must wait for answers to end.

The router does not ask replicas what they have cached. It remembers that in one `GhostIndex` for
each, as large as the replica's KV memory, which evicts as the replica does. A prompt is remembered
when it is booked, so that requests right after it find its prefix, and an answer when its request
ends. A replica with a tier below its KV memory has a second index, of both sizes: tokens that only
this one has are loaded, at a lower cost. When the replica dies, its second index goes to the next
one that finds the same files.

One `Router` must decide for all requests of a deployment: several would each spread every prefix
over replicas of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from radixcache.base import as_namespace
from radixcache.errors import InvalidRequest
from radixcache.radix.ghost import GhostIndex
from radixcache.tokens import Tokens, TokensLike, as_tokens, common_length

QUEUED = 0.9
"""Weight of a queued token. At 1, the second of two requests with a common prefix would avoid the
first one's few other tokens on an idle replica, and compute the prefix again there; besides, some
of the queue is computed by now. At 0.5 and below, load counts too little."""

LOADED = 0.05
"""Weight of a token that is loaded from a replica's disk: 3,000 of a Llama of 33 M took 1/27 of the
time of computing them (two cores, AVX-512); those of a larger model take less."""

SHORT = 4
"""Weight of a token that does not fit the replica and waits for answers to end. A step that decodes
for 64 requests takes as long as some 200 tokens of a prompt."""
ANSWER = 512
"""Expected tokens of the first answers; high, since waiting for room takes longest."""


MOST_LEFT = 16
"""Folders without a replica whose indexes are kept."""


class Standing(NamedTuple):
    """How suitable a replica is for a prompt.

    Attributes:
        num_tokens: length of the prompt.
        cached_tokens: tokens of it that the replica should have cached when it runs; tokens that it
            must load count less, by `LOADED`.
        queued_tokens: tokens of other requests that the replica has yet to compute.
        requests: requests that were sent there and have not ended.
        last: number of the last request that was sent there; 0 if there is none.
        short_tokens: tokens of KV that do not fit its memory with this request, or of answers that
            must end before it may run, whichever is more.
        cost: tokens to compute before the answer's first token, weighted.
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
"""Sort key of standings, the best first: at equal cost the replica with fewest requests, then the
one that got a request longest ago."""


@dataclass(eq=False)
class _Replica:
    """The state of one replica, as the router knows it."""

    name: Hashable
    ghost: GhostIndex
    max_num_seqs: int
    with_lower: GhostIndex | None = None
    """Prompts without a salt in KV memory or the tier below."""
    folder: Hashable = None
    queued_tokens: int = 0
    requests: int = 0
    last: int = 0
    prompts: list[tuple[int, bytes]] = field(default_factory=list)
    """Hash of the salt and prompt of each request; sorted, so that similar ones are neighbours."""
    held_tokens: int = 0
    """Tokens of these prompts; common prefixes count once."""

    def standing(self, tokens: Tokens, salt: Hashable, answer: float) -> Standing:
        """Its standing for a prompt, if each answer has `answer` tokens. O(len(tokens))."""
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
        """Note tokens that the replica computes. O(len(tokens)), amortised."""
        self.ghost.remember(tokens, salt)
        if self.with_lower is not None and salt is None:
            self.with_lower.remember(tokens)

    def hold(self, tokens: Tokens, salt: Hashable, sign: int) -> None:
        """Add a request (`sign` 1) or remove it (-1). O(len(tokens) · log(requests))."""
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
    """Orders replicas, and keeps account of what is cached and queued on each.

    For one event loop or one thread, as nothing is locked. Give tokens as int32 arrays, since lists
    are converted in each call; arrays are kept, not copied. A salt (`cache_salt`) is a namespace:
    prefixes are found only under their own. The caller names requests in flight by unique keys.

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
        self._left: dict[Hashable, GhostIndex] = {}  # of folders that no replica uses
        self._bookings: dict[Hashable, _Booking] = {}
        self._count = 0
        self._answer: float = ANSWER  # moving average of ended answers' lengths

    def add(
        self,
        replica: Hashable,
        kv_tokens: int,
        max_num_seqs: int = 64,
        lower_tokens: int = 0,
        folder: Hashable = None,
    ) -> None:
        """Add a replica, or empty the index of one that lost its cache.

        Args:
            kv_tokens: tokens that fit its KV memory. If unknown, guess high: too large an index
                routes better than one too small.
            max_num_seqs: requests that run there at the same time.
            lower_tokens: tokens that fit the tier below.
            folder: names the files of that tier. A replica that takes over another's has its index.

        Raises:
            InvalidRequest: `kv_tokens` or `max_num_seqs` is below 1; nothing has changed.
        """
        if max_num_seqs < 1:
            raise InvalidRequest(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        ghost = GhostIndex(kv_tokens)  # which refuses bad sizes
        self.forget(replica)
        with_lower = GhostIndex(kv_tokens + lower_tokens) if lower_tokens else None
        with_lower = self._left.pop(folder, with_lower)
        self._replicas[replica] = _Replica(replica, ghost, max_num_seqs, with_lower, folder)

    def forget(self, replica: Hashable) -> None:
        """Remove a replica, if there is one, and its bookings. O(requests in flight)."""
        if (left := self._replicas.pop(replica, None)) is not None:
            if left.folder is not None and left.with_lower is not None:
                self._left[left.folder] = left.with_lower
                for oldest in [*self._left][:-MOST_LEFT]:
                    del self._left[oldest]
            for key in [k for k, b in self._bookings.items() if b.replica == replica]:
                del self._bookings[key]

    def standings(self, tokens: TokensLike, salt: Hashable = None) -> list[Standing]:
        """The replicas' standings for a prompt. Changes nothing. O(replicas · len)."""
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
            InvalidRequest: there is no such replica, or `tokens` are invalid, or `salt` cannot
                be hashed; nothing has changed.
        """
        if (booked := self._replicas.get(replica)) is None:
            raise InvalidRequest(f"there is no replica {replica!r}")
        tokens, salt = as_tokens(tokens), as_namespace(salt)
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
        """Note that the first token has come: the prompt is computed. Ignores an unknown `key`."""
        booking = self._bookings.get(key)
        if booking is not None:
            self._replicas[booking.replica].queued_tokens -= booking.to_compute
            booking.to_compute = 0

    def release(self, key: Hashable, *answers: TokensLike) -> None:
        """End a request, finished or not; its tokens stay cached on its replica.

        Ignores an unknown `key`: the request may have ended before, or its replica.

        Args:
            answers: the generated tokens of each completion; the last of each has no KV.
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
        """Verify the bookings, the sums and each index. O(everything)."""
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
