"""The interface of every prefix cache.

A cache maps token prefixes to KV pages. It knows pages by number and never touches their bytes: the
owner of the KV tensors copies and writes them. The life of a request::

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
from collections.abc import Callable, Hashable, Iterable
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
from radixcache.lease import NO_PAGES, Lease
from radixcache.pages import PagePool, Pages, as_count
from radixcache.pins import Pins
from radixcache.snapshot import Outline
from radixcache.states.windows import WindowIndex
from radixcache.stats import CacheStats
from radixcache.tiers.index import LowerTier
from radixcache.tokens import Tokens, TokensLike, as_tokens


def as_namespace(namespace: Hashable) -> Hashable:
    """Normalise a namespace: "" becomes None; `InvalidRequest` if it is not hashable."""
    try:
        hash(namespace)
    except TypeError:
        raise InvalidRequest(f"a namespace must be hashable, not {repr(namespace)[:80]}") from None
    return None if isinstance(namespace, str) and not namespace else namespace


def as_name(name: str) -> str:
    """Validate the name of a pin; `InvalidRequest` unless it is a string."""
    if not isinstance(name, str):
        raise InvalidRequest(f"a name is a string, not {repr(name)[:80]}")
    return name


T = TypeVar("T")
_F = TypeVar("_F", bound=Callable[..., Any])


def mutation(method: _F) -> _F:
    """Decorates a method that changes the cache: one runs at a time, and wholly or not at all.

    Errors of `radixcache.errors` are raised before anything has changed. Any other exception (an
    interrupt, lack of memory, a listener's) may leave a change half done: the cache is then
    *broken*, and refuses all further changes until `recover`.
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
                self._inside = False  # the arguments do not fit: nothing has run
            raise
        self._inside = False
        return result

    return cast(_F, call)


Coming = Callable[[], Iterable[tuple[TokensLike, Hashable]]]
"""Gives the prompts that will be looked up next, in that order, each with its namespace."""


class PrefixCache(ABC):
    """A map from token prefixes to KV pages; one instance serves one engine, from one thread.

    A change is refused while another thread makes one (`WrongThread`).

    Everything published since the last `commit` is *in flight*: it belongs to the step being
    scheduled. Other leases may share it at once, since within each layer a step writes all new K/V
    before attention reads any; but only in whole pages, since a page copy runs before the step.
    """

    pool: PagePool
    page_size: int
    """Tokens per page."""
    granularity: int
    """Hits are multiples of this many tokens: 1, or a page."""
    caches: ClassVar[bool] = True
    """Whether there are ever any hits."""
    full_prompt_hits: bool = False
    """Whether an engine keeps the logits of last tokens for it, and asks to `include_last`."""
    stats: CacheStats
    events: list[Listener]
    """Callables that receive each `Stored`, `Evicted` and `Cleared`; see `radixcache.events`."""
    lower: LowerTier[Any] | None = None
    """Keeps the pages that a radix cache evicts; without one they are forgotten."""
    windows: WindowIndex | None = None
    """Keeps pages of layers with a window, if they are apart from those of all other layers."""
    coming: Coming = staticmethod(lambda: ())
    """What a radix cache evicts after all else: what these prompts will find."""
    clock = 0
    """The number of the last use that counts for eviction."""
    pins: Pins
    """Pinned tokens by namespace and name, and the pages that they hold."""
    _leases: dict[Any, None]
    """The live leases, those of pins included."""
    _in_flight: dict[Any, Any]
    """The leases on tokens that the step being scheduled writes."""
    changes = 0
    """Releases, unpins, evictions and steps that wrote: as long as it stays the same, look-ups find
    the same, and no more pages can be reserved."""
    _thread = 0
    """The thread that made the last change, or is making it."""
    _inside = False
    """A change is under way, or was cut off."""

    def __init__(self, pool: PagePool, granularity: int) -> None:
        self.pool, self.page_size, self.granularity = pool, pool.page_size, granularity
        self.pins = Pins(pool.num_pages // 2 * self.caches)
        self.stats = CacheStats()
        self.events = []
        self._forget_all()

    @abstractmethod
    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """How many leading tokens `acquire` would find now. Changes nothing.

        At most ``len(tokens) - 1``: one token must be computed to get logits.
        """

    @abstractmethod
    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """How many leading tokens are cached, where `match` leaves out the last one and those in
        flight in a half-filled page. Changes nothing. O(len(tokens))."""

    def find_pages(self, tokens: Tokens, namespace: Hashable) -> tuple[Pages, int]:
        """The pages of the longest cached prefix, in flight or not, and its length. O(length)."""
        return NO_PAGES, 0

    def next_prompts(self, count: int) -> Iterable[tuple[Tokens, Hashable]]:
        """The first of `coming`, where eviction takes that hint."""
        return ()

    @mutation
    def acquire(
        self,
        tokens: TokensLike,
        namespace: Hashable = None,
        *,
        resumed: bool = False,
        include_last: bool = False,
    ) -> Lease:
        """Pin the longest cached prefix of `tokens`, at most all but the last; return its lease.

        With `include_last`, for callers that have the logits of the last token: pin all of `tokens`
        if they are cached and written, else the same as without. Changes neither statistics nor
        eviction order until the first `publish`.
        """
        tokens, namespace = as_tokens(tokens), as_namespace(namespace)
        lease = self._acquire(tokens, namespace, resumed, include_last)
        self._leases[lease] = None
        return lease

    @abstractmethod
    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> Lease:
        """`acquire`, but for the registration of the lease."""

    @mutation
    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Grow the lease's page table to hold `num_tokens` tokens; evict if needed.

        A shared half-filled page at the cursor is appended to in place if no lease has written past
        the cursor, else replaced by a copy (copy-on-write), which `Lease.take_copies` reports.
        `OutOfPages` if free and evictable pages do not suffice; then nothing has changed.
        """
        lease, num_tokens = self._mine(lease), as_count(num_tokens, "the number of tokens")
        if num_tokens > lease.capacity:
            self._reserve(lease, num_tokens)

    @abstractmethod
    def _reserve(self, lease: Any, num_tokens: int) -> None:
        """`reserve` of more tokens than the lease has room for."""

    @mutation
    def publish(self, lease: Lease, tokens: TokensLike, *, written: bool = False) -> None:
        """Append `tokens`, whose KV the step being scheduled writes: other leases may share them.

        With `written`, their KV is there already, and nothing is in flight: an engine may publish
        decoded tokens by the page. If another lease has these tokens in flight, or those before
        them, nothing is published, as `lease.num_tokens` then says.

        Where the cache holds the same tokens already, whole duplicate pages are freed and the
        lease's table points at the cached ones when the call returns. O(len(tokens)).

        Raises:
            LeaseError: fewer tokens are reserved, or the lease has published in this step already.
        """
        lease, tokens = self._mine(lease), as_tokens(tokens)
        lease._check_publish(len(tokens))
        self._publish(lease, tokens, written)

    @abstractmethod
    def _publish(self, lease: Any, tokens: Tokens, written: bool) -> None:
        """`publish` of tokens that the lease has room for."""

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
        """The step has run, or is enqueued in order on its device: nothing is in flight."""
        self._end_step()

    def _end_step(self) -> None:
        self.changes += bool(self._in_flight)
        for lease in self._in_flight:
            lease.publishing = False
        self._in_flight.clear()

    @abstractmethod
    def rollback(self) -> None:
        """The step has failed: un-publish all that is in flight. Each lease moves back to the last
        position whose KV is written, and loses reserved pages beyond it and pending copies."""

    @mutation
    def release(self, lease: Lease, *, ended: bool = False, discard: bool = False) -> None:
        """End a lease: what it published stays cached until evicted, reserved pages are freed.

        With `ended`, as no prompt will go on from there, a radix cache evicts first what the lease
        alone has used. With `discard`, as its KV is spoilt, that goes at once.
        `LeaseError` if it was released before, or has tokens in flight: commit or roll back first.
        """
        lease = self._mine(lease)
        if lease.publishing:
            raise LeaseError("the lease has tokens in flight: commit or roll back first")
        if self.windows is not None:
            self.windows.drop(lease)
        lease.ended = ended
        self._end(lease, discard)

    def _end(self, lease: Lease, discard: bool = False) -> None:
        self.changes += 1
        self._in_flight.pop(lease, None)
        del self._leases[lease]
        lease.released = True
        self._release(lease)
        if discard:
            self._discard(lease)

    @abstractmethod
    def _release(self, lease: Any) -> None:
        """Release what a lease holds that has ended, with nothing in flight."""

    def _discard(self, lease: Any) -> None:  # noqa: B027
        """Forget what an ended lease has published and nothing else needs."""

    def _mine(self, lease: Lease) -> Any:
        if not isinstance(lease, Lease) or lease not in self._leases:
            raise LeaseError("the lease was released, or belongs to another cache")
        return lease

    def _count(self, lease: Lease) -> None:
        """Count a lease in the statistics the first time that it is used."""
        if not lease.used:
            lease.used = True
            self.stats.count(lease)

    @mutation
    def change(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that changes what is kept beside the cached tokens, as one change."""
        return function(*args)

    def take_pages(self, count: int) -> Pages:
        """`count` pages for a window, by eviction if needed; within a change of the cache.

        Raises:
            OutOfPages: nothing has changed.
        """
        return self.pool.allocate(count)

    @mutation
    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` cached pages that no lease holds; returns how many it freed."""
        return self._evict(as_count(num_pages, "the number of pages"))

    @abstractmethod
    def _evict(self, num_pages: int) -> int:
        """`evict` of a valid number of pages."""

    def would_evict(self, num_pages: int) -> bool:
        """Whether `num_pages` new pages take the place of cached ones. O(num_pages)."""
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
        """Let a lease that has found a whole prefix be that of a pin."""

    @mutation
    def unpin(self, name: str, namespace: Hashable = None) -> None:
        """Drop a pin; `PinError` if the namespace has none of that name."""
        lease = self.pins.leases.pop((as_namespace(namespace), as_name(name)), None)
        if lease is None:
            raise PinError(f"no prefix named {name!r} is pinned")
        self._end(lease)

    def pinned_pages_beside(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        """Pinned pages that a prompt does not share, or that it may have to copy because a pin ends
        in them. O(tokens), if there are pins."""
        if not self.pins:
            return 0
        lease = self.acquire(tokens, namespace)
        beside = self.pins.num_pages_beside(lease)
        self.release(lease)
        return beside

    @property
    def leased_pages(self) -> int:
        """Distinct pages that leases and pins hold; all others are free or evictable. O(pages)."""
        held = np.zeros(self.pool.num_pages, bool)
        for lease in self._leases:
            held[lease.page_table] = True
        return int(held.sum()) + (0 if self.windows is None else self.windows.num_running)

    @abstractmethod
    def outline(self) -> Outline[Any]:
        """The nodes that pictures are drawn from; valid until the cache changes."""

    @mutation
    def reset(self) -> None:
        """Empty the cache and zero the statistics; `LeaseError` while a lease lives."""
        if self._leases:
            num_leases, names = len(self._leases) - len(self.pins), [n for _, n in self.pins]
            wanted = [f"release {num_leases} lease{'s' * (num_leases > 1)}"] * (num_leases > 0)
            wanted += [f"unpin {', '.join(map(repr, names))}"] * (len(names) > 0)
            raise LeaseError(f"before a reset, {' and '.join(wanted)}")
        self._forget_cached()
        if self.windows is not None:
            self.windows.forget()
        self.stats = CacheStats()
        self._emit(Cleared())

    def _forget_cached(self) -> None:  # noqa: B027
        """Empty the cache, while there is no lease."""

    @property
    def broken(self) -> bool:
        """Whether a change was cut off half-way; meaningful between calls only."""
        return self._inside

    @property
    def idle(self) -> bool:
        """Whether no lease lives, and nothing was cut off."""
        return not self._leases and not self._inside

    @property
    def in_flight(self) -> bool:
        """Whether a step is being scheduled, whose tokens `rollback` would un-publish."""
        return bool(self._in_flight)

    def recover(self) -> None:
        """After an exception cut a step off: roll back, and end every lease but those of pins.

        If a change of the cache itself was cut off, what it holds is not known, and all of it is
        forgotten: pins too, but neither the statistics nor the tiers below. This call may itself be
        cut off, and made again.
        """
        if not self.broken:
            try:
                self.rollback()
                pinned = set(self.pins.leases.values())
                for lease in [lease for lease in self._leases if lease not in pinned]:
                    self.release(lease)
                if self.windows is not None:
                    self.change(self.windows.recover)
                return
            except Exception:  # a change is half done
                pass
        self._inside = True
        for lease in [*self._leases]:
            lease.released = True
        self.pool.clear()
        self.pins.leases.clear()
        self._forget_all()
        if self.windows is not None:
            self.windows.clear()
        self._emit(Cleared())
        self._inside = False

    @abstractmethod
    def _forget_all(self) -> None:
        """Start empty on a pool whose pages are all free: no lease, no pin, nothing cached."""

    def _refuse(self) -> None:
        """Raise the reason why nothing can be changed now."""
        if self._thread != get_ident():
            raise WrongThread("a cache is for one thread, and another one is changing it")
        raise CacheBroken("a change of the cache was cut off half-way: call recover() first")

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; `AssertionError` names the one that broke. O(everything)."""

    def _count_windows(self) -> Pages | int:
        """[num_pages] how often windows hold each page of the pool, after a check of them."""
        return 0 if self.windows is None else self.windows.check(self._leases)

    def _emit(self, event: Stored | Evicted | Cleared) -> None:
        try:
            for listener in self.events:
                listener(event)
        except RadixCacheError as error:  # `mutation` would take the change for undone
            raise RuntimeError(f"a listener of the cache failed: {error}") from error
