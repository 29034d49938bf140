"""A call with an argument of a wrong type is refused, and leaves every cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from radixcache import HashBlockCache, InvalidRequest, LeaseError, NoCache, PagePool, RadixCache
from radixcache.base import PrefixCache

CACHES = {"radix": RadixCache, "hash-block": HashBlockCache, "none": NoCache}
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class NoArray:
    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("on another device")


def calls(cache: Any, lease: Any) -> dict[str, tuple[type[Exception], Callable[[], Any]]]:
    """What is refused, and with what."""
    numbers = {"None": None, "a text": "x", "a fraction": 2.5, "a list": [1]}
    wrong: dict[str, tuple[type[Exception], Callable[[], Any]]] = {}
    for kind, number in numbers.items():
        wrong[f"reserve {kind}"] = InvalidRequest, partial(cache.reserve, lease, number)
        if not isinstance(cache, NoCache):
            wrong[f"evict {kind}"] = InvalidRequest, partial(cache.evict, number)
    for kind, tokens in {"None": None, "text": "abc", "array": NoArray(), "nested": [[1]]}.items():
        wrong[f"acquire {kind}"] = InvalidRequest, partial(cache.acquire, tokens)
        wrong[f"publish {kind}"] = InvalidRequest, partial(cache.publish, lease, tokens)
    wrong["acquire in a list"] = InvalidRequest, lambda: cache.acquire(TOKENS, [])
    others: dict[str, Any] = {"None": None, "text": "x", "list": [], "class": type(lease)}
    for kind, other in others.items():
        for name in ("release", "publish", "reserve"):
            more: tuple[Any, ...] = {"release": (), "publish": (TOKENS,), "reserve": (9,)}[name]
            call = partial(getattr(cache, name), other, *more)
            wrong[f"{name} of {kind}"] = LeaseError, call
    if not isinstance(cache, NoCache):
        wrong["pin without a name"] = InvalidRequest, lambda: cache.pin([], TOKENS)
        wrong["pin in a list"] = InvalidRequest, lambda: cache.pin("a", TOKENS, [])
    wrong["unpin without a name"] = InvalidRequest, lambda: cache.unpin(None)
    wrong["unpin in a dict"] = InvalidRequest, lambda: cache.unpin("a", {})
    wrong["too few"] = TypeError, lambda: cache.reserve(lease)
    wrong["too many"] = TypeError, lambda: cache.commit(1)
    wrong["of another name"] = TypeError, lambda: cache.evict(pages=1)
    return wrong


@pytest.mark.parametrize("kind", CACHES)
def test_a_wrong_type_is_refused_and_breaks_nothing(kind: str) -> None:
    cache: PrefixCache = CACHES[kind](PagePool(16, 2))
    lease = cache.acquire(TOKENS)
    cache.reserve(lease, len(TOKENS))
    for name, (error, call) in calls(cache, lease).items():
        with pytest.raises(error):
            call()
        assert not cache.broken, name
        cache.check()
    cache.publish(lease, TOKENS)
    cache.commit()
    cache.release(lease)
    assert cache.match(TOKENS) == {"radix": 8, "hash-block": 8, "none": 0}[kind]
    cache.check()


@pytest.mark.parametrize(
    "size", [(1.5, 4), (4, 1.5), ("4", 4), (None, 4), (0, 4), (4, 0), (2**31, 4), (2**31, 2**31)]
)
def test_a_pool_of_no_possible_size_is_refused(size: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidRequest):
        PagePool(*size)


def test_a_pool_takes_the_numbers_of_numpy() -> None:
    pool = PagePool(np.int64(4), np.uint8(2))
    assert type(pool.num_pages) is type(pool.page_size) is int


@pytest.mark.parametrize("kind", ["radix", "hash-block"])
def test_an_empty_salt_is_none_in_every_cache(kind: str) -> None:
    cache: PrefixCache = CACHES[kind](PagePool(16, 2))
    lease = cache.acquire(TOKENS, "")
    cache.reserve(lease, len(TOKENS))
    cache.publish(lease, TOKENS)
    cache.commit()
    cache.release(lease)
    assert cache.match(TOKENS) == cache.match(TOKENS, "") == 8
    cache.pin("a", TOKENS[:8], "")
    assert cache.pins == {(None, "a"): 8} and cache.pinned_pages_of("") == 4
    cache.unpin("a")
    assert cache.match(TOKENS, "b") == 0
