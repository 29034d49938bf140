"""A call with a wrong argument is refused, and leaves every cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixcache import (
    HashBlockCache,
    InvalidRequest,
    LeaseError,
    NoCache,
    PagePool,
    PinError,
    PrefixCache,
    RadixCache,
    RadixCacheError,
)
from tests.index.drive import put

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LEASE = object()
"""Stands for a live lease of the cache."""


class NoArray:
    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("on another device")


NO_NUMBERS = (None, "x", 2.5, [1])
NO_TOKENS = (
    None, "abc", NoArray(), [[1]], [[1, 2], [3]], [1.5], [2**31],
    np.ma.array([1, 2], np.int32, mask=[False, True]),
)  # fmt: skip
NO_LEASES: tuple[Any, ...] = (None, "x", [], object)
REFUSED: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    *(("reserve", (LEASE, number), InvalidRequest) for number in NO_NUMBERS),
    *(("acquire", (tokens,), InvalidRequest) for tokens in NO_TOKENS),
    *(("publish", (LEASE, tokens), InvalidRequest) for tokens in NO_TOKENS),
    *(("release", (lease,), LeaseError) for lease in NO_LEASES),
    *(("publish", (lease, TOKENS), LeaseError) for lease in NO_LEASES),
    *(("reserve", (lease, 9), LeaseError) for lease in NO_LEASES),
    ("acquire", (TOKENS, []), InvalidRequest),
    ("reserve", (LEASE, 10**9), RadixCacheError),
    ("unpin", (None,), InvalidRequest),
    ("unpin", ("a", {}), InvalidRequest),
    ("unpin", ("nobody",), PinError),
    ("reserve", (LEASE,), TypeError),
    ("commit", (1,), TypeError),
]
REFUSED_WHERE_THERE_IS_A_CACHE: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    *(("evict", (number,), InvalidRequest) for number in NO_NUMBERS),
    ("pin", ([], TOKENS), InvalidRequest),
    ("pin", ("a", TOKENS, []), InvalidRequest),
    ("match", (TOKENS, []), InvalidRequest),
    ("cached_length", (TOKENS, []), InvalidRequest),
]


@pytest.mark.parametrize(("kind", "cached"), [(RadixCache, 8), (HashBlockCache, 8), (NoCache, 0)])
def test_a_wrong_argument_is_refused_and_breaks_nothing(
    kind: Callable[[PagePool], PrefixCache], cached: int
) -> None:
    cache = kind(PagePool(16, 2))
    lease = cache.acquire(TOKENS)
    cache.reserve(lease, len(TOKENS))
    before = cache.pool.refs.tolist()
    calls = REFUSED + (REFUSED_WHERE_THERE_IS_A_CACHE if cached else [])
    for name, arguments, error in calls:
        given = [lease if argument is LEASE else argument for argument in arguments]
        with pytest.raises(error):
            getattr(cache, name)(*given)
        assert not cache.broken, (name, arguments)
        cache.check()
    for nothing in (lambda: cache.reserve(lease, -1), lambda: cache.evict(-1)):
        nothing()
    assert cache.pool.refs.tolist() == before
    cache.publish(lease, TOKENS)
    cache.commit()
    cache.release(lease)
    assert cache.match(TOKENS) == cached


@pytest.mark.parametrize(
    "size", [(1.5, 4), (4, 1.5), ("4", 4), (None, 4), (0, 4), (4, -1), (2**31, 4), (4, 2**31)]
)
def test_a_pool_of_no_possible_size_is_refused(size: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidRequest):
        PagePool(*size)


@pytest.mark.parametrize("kind", [RadixCache, HashBlockCache])
def test_an_empty_salt_is_none_in_every_cache(kind: Callable[[PagePool], PrefixCache]) -> None:
    cache = kind(PagePool(16, 2))
    put(cache, TOKENS, "")
    assert cache.match(TOKENS) == cache.match(TOKENS, "") == 8
    cache.pin("a", TOKENS[:8], "")
    assert cache.pins == {(None, "a"): 8} and cache.pins.num_pages_of(None) == 4
    cache.unpin("a")
    assert cache.match(TOKENS, "b") == 0
