"""The interface of every prefix cache.

A cache maps token prefixes to KV pages. It knows pages by number and never touches their bytes:
whoever owns the KV tensors copies and writes them. One request lives like this::

    lease = cache.acquire(prompt)                    # pin the longest cached prefix
    cache.reserve(lease, len(prompt))                # make room for the suffix
    cache.publish(lease, prompt[lease.num_tokens:])  # others may share it from now on
    ...                                              # do lease.take_copies(), run the model
    cache.commit()                                   # the step ran: its KV is written
    ...                                              # the same for each decoded token
    cache.release(lease)                             # stays cached until evicted

The token at absolute position p of a sequence lives in slot ``p % page_size`` of page
``lease.page_table[p // page_size]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from radixcache.errors import (
    CacheBroken,
    InvalidRequest,
    LeaseError,
    PinError,
    RadixCacheError,
    WrongThread,
)
from radixcache.events import Cleared, Evicted, Listener, Stored
from radixcache.lease import Lease
from radixcache.nodes import Tokens as Tokens
from radixcache.pages import PagePool
from radixcache.pins import Pins
from radixcache.snapshot import EVERYTHING, CachedNode, Look, Outline
from radixcache.tier import LowerTier

TokensLike = Tokens | Sequence[int]
"""What the interface accepts; anything but an int32 array is converted once, at the boundary."""

_INT32 = np.dtype(np.int32)


def as_tokens(tokens: TokensLike) -> Tokens:
    """`tokens` as a one-dimensional int32 array, no copy if it is one already; `InvalidRequest` for
    what is no flat sequence of integers of 32 bits."""
    try:
        array = np.asarray(tokens)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # rows of different lengths, or whatever what is no array makes of it
        raise InvalidRequest("tokens must be a flat sequence of integers") from None
    if array.dtype == _INT32 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest("tokens must be a flat sequence of integers")
    if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise InvalidRequest("token ids must fit 32 bits")
    return array.astype(np.int32)


def as_namespace(namespace: Hashable) -> Hashable:
    """The same, but that "" is None; `InvalidRequest` for what cannot be a key."""
    try:
        hash(namespace)
    except TypeError:
        raise InvalidRequest(f"a namespace must be hashable, not {repr(namespace)[:80]}") from None
    return None if isinstance(namespace, str) and not namespace else namespace


def as_name(name: str) -> str:
    """The name of a pin; `InvalidRequest` for what is none."""
    if not isinstance(name, str):
        raise InvalidRequest(f"a name is a string, not {repr(name)[:80]}")
    return name


@dataclass
class CacheStats:
    """Counters since the last `reset`. Tokens count once per lease, at its first `publish`.

    A lease acquired with ``resumed=True`` (a request put back after preemption) counts in the two
    ``resumed_`` fields instead, so that preemption cannot flatter the hit rate.
    """

    requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0
    evicted_tokens: int = 0
    evicted_pages: int = 0
    copied_pages: int = 0
    loaded_tokens: int = 0
    """Of the hits, those that came up from a lower tier."""

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hit, 0.0 before the first request."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        counts = vars(other)
        return CacheStats(**{name: count + counts[name] for name, count in vars(self).items()})

    def count(self, lease: Lease) -> None:
        """Count an admitted lease."""
        if lease.resumed:
            self.resumed_query_tokens += lease.query_tokens
            self.resumed_hit_tokens += lease.cached_tokens
        else:
            self.requests += 1
            self.query_tokens += lease.query_tokens
            self.hit_tokens += lease.cached_tokens


_F = TypeVar("_F", bound=Callable[..., Any])


def mutation(method: _F) -> _F:
    """A method that changes the cache: one at a time, and whole.

    What `radixcache.errors` defines is raised before anything has changed. Whatever else comes out
    (an interrupt, for want of memory, from a listener) may leave half a change behind, so that the
    cache is *broken*: it refuses all further changes until `recover`.
    """

    @wraps(method)
    def call(self: PrefixCache, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            self._refuse()
        self._thread, self._inside = get_ident(), True
        try:
            result = method(self, *args, **kwargs)
        except RadixCacheError:
            self._inside = False
            raise
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                self._inside = False  # it was called with other arguments than it has
            raise
        self._inside = False
        return result

    return cast(_F, call)


class PrefixCache(ABC):
    """A map from token prefixes to KV pages; one instance serves one engine, from one thread.

    A change while another thread makes one is refused (`WrongThread`).

    Everything published since the last `commit` is *in flight*: it belongs to the step being
    scheduled. Others may share it at once, because within each layer a step writes all new K/V
    before attention reads any, but only in whole pages, because a copy would run too early.
    """

    pool: PagePool
    page_size: int
    """Tokens per page."""
    granularity: int
    """Hits are multiples of this many tokens: 1, or a page."""
    caches: ClassVar[bool] = True
    """Whether there are ever any hits."""
    full_prompt_hits: bool = False
    """Whether `acquire` obeys `include_last`; a cache that does not ignores it."""
    stats: CacheStats
    events: list[Listener]
    """Callables that receive each `Stored`, `Evicted` and `Cleared`; see `radixcache.events`."""
    lower: LowerTier[Any] | None = None
    """Where a radix cache's pages go that are evicted; None forgets them."""
    pins: Pins
    """Pinned tokens by namespace and name, and the pages that they hold."""
    _leases: dict[Any, None]
    """Those that live, pins included."""
    _in_flight: dict[Any, Any]
    """Those that stand on tokens that the step being scheduled writes."""
    changes = 0
    """Releases, unpins, evictions and steps that wrote: in between, nobody finds anything else, or
    can reserve more."""
    _thread = 0
    """Who made the last change, or is making it."""
    _inside = False
    """A change is under way, or was cut off."""

    def __init__(self, pool: PagePool, granularity: int) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.granularity = granularity
        self.pins = Pins(pool.num_pages // 2 * self.caches)
        self.stats = CacheStats()
        self.events = []
        self._forget_all()

    @abstractmethod
    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """Number of leading tokens that `acquire` would find now. Changes nothing.

        At most ``len(tokens) - 1``: one token must be computed to get logits.
        """

    @abstractmethod
    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """Number of leading tokens that are cached; `match` leaves out the last one, and what is in
        flight in a half-filled page. Changes nothing. O(len(tokens))."""

    @abstractmethod
    def acquire(
        self,
        tokens: TokensLike,
        namespace: Hashable = None,
        *,
        resumed: bool = False,
        include_last: bool = False,
    ) -> Lease:
        """Pin the longest cached prefix of `tokens`, at most all but the last; return its lease.

        With `include_last`, for callers that have the logits of the last token: all of `tokens`, if
        they are cached and written, else the same as without.

        Touches neither statistics nor eviction order until the first `publish`.
        """

    @abstractmethod
    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Grow the page table to hold `num_tokens` tokens, evicting if needed.

        A shared half-filled page at the cursor is appended to in place if nobody has written past
        the cursor, else replaced by a copy, which `Lease.take_copies` reports.
        `OutOfPages` if free and evictable pages do not suffice; then nothing has changed.
        """

    @abstractmethod
    def publish(self, lease: Lease, tokens: TokensLike, *, written: bool = False) -> None:
        """Append `tokens`, whose KV the step being scheduled writes; others may share them now.

        With `written`, their KV is there already: nothing is in flight. An engine may so publish
        decoded tokens by the page. If another lease has the same tokens in flight, or those before
        them, nothing is published, as `lease.num_tokens` then says.

        Where the cache holds the same tokens already, whole duplicate pages are freed and the
        lease's table points at the cached ones when the call returns. O(len(tokens)).

        Raises:
            LeaseError: fewer tokens are reserved, or the lease has published in this step already.
        """

    @mutation
    def touch(self, lease: Lease) -> None:
        """Count as used a lease that has found its whole prompt, so that it need not publish."""
        lease = self._mine(lease)
        if lease.cached_tokens < lease.query_tokens:
            raise LeaseError("touch is for a hit of the whole prompt: publish the rest of it")
        self._touch(lease)
        self._count(lease)

    def _touch(self, lease: Any) -> None:  # noqa: B027
        """`touch` of a lease of this cache."""

    @mutation
    def commit(self) -> None:
        """The step was executed (or enqueued in order on its device): nothing is in flight."""
        self._end_step()

    def _end_step(self) -> None:
        self.changes += bool(self._in_flight)
        for lease in self._in_flight:
            lease.publishing = False
        self._in_flight.clear()

    @abstractmethod
    def rollback(self) -> None:
        """The step failed: un-publish everything in flight. Each lease moves back to the last
        position whose KV is written; its reserved pages beyond and its pending copies are gone."""

    @mutation
    def release(self, lease: Lease) -> None:
        """Unpin; what was published stays cached until evicted, reserved pages are freed.
        `LeaseError` if it was released before, or has tokens in flight: commit or rollback first.
        """
        lease = self._mine(lease)
        if lease.publishing:
            raise LeaseError("the lease has tokens in flight: commit or roll back first")
        self.changes += 1
        self._release(lease)

    @abstractmethod
    def _release(self, lease: Any) -> None:
        """`release` of a lease of this cache that has nothing in flight."""

    def _mine(self, lease: Lease) -> Any:
        if not isinstance(lease, Lease) or lease not in self._leases:
            raise LeaseError("the lease was released, or belongs to another cache")
        return lease

    def _count(self, lease: Lease) -> None:
        """The lease publishes: the first time, it is admitted."""
        if not lease.used:
            lease.used = True
            self.stats.count(lease)

    @abstractmethod
    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that no lease uses; returns how many became free."""

    def would_evict(self, num_pages: int) -> bool:
        """Whether something cached must go for so many new pages. O(num_pages)."""
        return num_pages > self.pool.num_free

    def pin(self, name: str, tokens: TokensLike, namespace: Hashable = None) -> None:
        """Keep the cached prefix `tokens` from eviction until `unpin(name, namespace)`; where hits
        are whole pages, the whole pages of it.

        Raises:
            PinError: the namespace has that name, the prefix is not cached in full, or the pages of
                the namespace's pins would exceed its share, or those of all pins the budget.
        """
        key = as_namespace(namespace), as_name(name)
        tokens = as_tokens(tokens)
        lease = self.acquire(tokens, namespace, include_last=True)
        try:
            if not self.caches:
                raise PinError(f"{name!r} cannot be pinned: the engine runs without a prefix cache")
            wanted = max(1, len(tokens) // self.granularity) * self.granularity
            if lease.num_tokens < wanted:
                raise PinError(
                    f"{lease.num_tokens} of the {wanted} tokens of {name!r} to pin are cached"
                )
            if lease in self._in_flight:
                raise PinError(f"the tokens of {name!r} are still in flight")
            self.pins.check(name, key[0], lease.page_table)
        except PinError:
            self.release(lease)
            raise
        self._pin(lease)
        self.pins.leases[key] = lease

    def _pin(self, lease: Any) -> None:  # noqa: B027
        """A lease that has found a whole prefix becomes that of a pin."""

    @mutation
    def unpin(self, name: str, namespace: Hashable = None) -> None:
        """Drop a pin; `PinError` if the namespace has none of that name."""
        lease = self.pins.leases.pop((as_namespace(namespace), as_name(name)), None)
        if lease is None:
            raise PinError(f"no prefix named {name!r} is pinned")
        self.changes += 1
        self._release(lease)

    def pinned_pages_beside(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """Pinned pages that are not among those of a prompt, or in which a pin ends, so that it may
        have to copy them. O(tokens), if there are pins."""
        if not self.pins:
            return 0
        lease = self.acquire(tokens, namespace)
        beside = self.pins.num_pages_beside(lease)
        self.release(lease)
        return beside

    @property
    def leased_pages(self) -> int:
        """Distinct pages that leases hold, pins included; all others can be had. O(these)."""
        held = np.zeros(self.pool.num_pages, bool)
        for lease in self._leases:
            held[lease.page_table] = True
        return int(held.sum())

    def outline(self) -> Outline[Any]:
        """What pictures of the cache are drawn from, until the cache changes."""
        raise NotImplementedError(f"of a {type(self).__name__} there are no pictures")

    def snapshot(self, look: Look = EVERYTHING) -> dict[Hashable, CachedNode]:
        """What is cached, as a tree below each namespace's root; see `radixcache.snapshot`.

        Changes nothing, and shares nothing with the cache: it may be read in another thread.
        """
        picture = self.outline().draw(look)
        return picture.roots if picture else {}

    @mutation
    def reset(self) -> None:
        """Forget all that is cached and zero the statistics; `LeaseError` while a lease lives."""
        if self._leases:
            num_leases, names = len(self._leases) - len(self.pins), [n for _, n in self.pins]
            wanted = [f"release {num_leases} lease{'s' * (num_leases > 1)}"] * (num_leases > 0)
            wanted += [f"unpin {', '.join(map(repr, names))}"] * (len(names) > 0)
            raise LeaseError(f"before a reset, {' and '.join(wanted)}")
        self._forget_cached()
        self.stats = CacheStats()
        self._emit(Cleared())

    def _forget_cached(self) -> None:  # noqa: B027
        """Forget all that is cached, while there is no lease."""

    @property
    def broken(self) -> bool:
        """Whether a change was cut off half-way. Of interest between calls only."""
        return self._inside

    @property
    def idle(self) -> bool:
        """Whether no lease lives, and nothing was cut off."""
        return not self._leases and not self._inside

    @property
    def in_flight(self) -> bool:
        """Whether a step is being scheduled: what it writes may yet be un-published."""
        return bool(self._in_flight)

    def recover(self) -> None:
        """A step was cut off by an exception: roll back, and end every lease but those of pins.

        If a change of the cache itself was cut off, so that nobody knows what it holds, all is
        forgotten: pins too, but not the statistics, nor what is in tiers below. May be cut off
        itself, and called again.
        """
        if not self.broken:
            try:
                self.rollback()
                pinned = set(self.pins.leases.values())
                for lease in [lease for lease in self._leases if lease not in pinned]:
                    self.release(lease)
                return
            except Exception:  # then half of it is done
                pass
        self._inside = True
        for lease in [*self._leases]:
            lease.released = True
        self.pool.clear()
        self.pins.leases.clear()
        self._forget_all()
        self._emit(Cleared())
        self._inside = False

    @abstractmethod
    def _forget_all(self) -> None:
        """Begin anew on a pool whose pages are all free: no lease, no pin, nothing cached."""

    def _refuse(self) -> None:
        """Say why nothing can be changed now."""
        if self._thread != get_ident():
            raise WrongThread("a cache is for one thread, and another one is changing it")
        raise CacheBroken("a change of the cache was cut off half-way: call recover() first")

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; `AssertionError` names the one that broke. O(everything)."""

    def _emit(self, event: Stored | Evicted | Cleared) -> None:
        try:
            for listener in self.events:
                listener(event)
        except RadixCacheError as error:  # `mutation` would think that nothing has changed
            raise RuntimeError(f"a listener of the cache failed: {error}") from error
