"""Whatever cuts a step off: no token is wrong, no page is lost, nothing goes on for ever."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from radixcache import (
    CacheBroken,
    LeaseError,
    PagePool,
    PrefixCache,
    RadixCache,
    SamplingParams,
    WrongThread,
)
from tests.helpers.cover import seeds
from tests.helpers.engines import (
    CACHES,
    finish,
    make_engine,
)
from tests.runtime.engine import cut_off

SEED = 20_261_122


@seeds(SEED, 4)
def test_steps_cut_off_at_random_lines_change_nothing(seed: int) -> None:
    places = [place for run in range(40) for place in cut_off.one(1000 * seed + run)]
    print(f"seed {seed}: {len(places)} times cut off, at {len(set(places))} lines")
    assert len(places) > 60
    assert any("recover" in place.lower() for place in places), "never in a recovery"


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_cache_cut_off_half_way_says_so_until_it_recovers(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    cache = RadixCache(PagePool(16, 4))
    cache.events.append(lambda event: None)
    lease = cache.acquire([1, 2, 3, 4, 5])
    cache.reserve(lease, 5)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cache._tree, "add_child", fail)
    with pytest.raises(error):
        cache.publish(lease, [1, 2, 3, 4, 5])
    assert cache.broken
    for call in (cache.commit, lambda: cache.acquire([1]), lambda: cache.release(lease)):
        with pytest.raises(CacheBroken, match=r"half-way: call recover\(\) first"):
            call()
    cache.recover()
    cache.check()
    assert not cache.broken and lease.released and cache.pool.num_free == 16
    with pytest.raises(LeaseError):
        cache.release(lease)
    assert cache.match([1, 2, 3, 4, 5]) == 0


CHANGES: dict[str, tuple[Any, ...]] = {
    "acquire": ([1],), "reserve": (None, 1), "publish": (None, [1]), "touch": (None,),
    "commit": (), "rollback": (), "release": (None,), "evict": (1,),
    "pin": ("a", [1]), "unpin": ("a",), "reset": (), "change": (len, ""),
}  # fmt: skip
LOOKS: dict[str, tuple[Any, ...]] = {
    "match": ([1, 2],), "cached_length": ([1],), "would_evict": (1,),
    "pinned_pages_beside": ([1],), "outline": (), "find_pages": (np.array([1], np.int32), None),
    "next_prompts": (1,),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES.values())
def test_while_a_cache_is_broken_it_refuses_changes_and_answers_the_rest(
    kind: Callable[[PagePool], PrefixCache],
) -> None:
    """Each method of the interface is one or the other."""
    methods = {n for n, m in vars(PrefixCache).items() if n[0] != "_" and inspect.isfunction(m)}
    assert methods == {*CHANGES, *LOOKS, "recover", "check", "take_pages"}
    cache = kind(PagePool(8, 1))
    lease = cache.acquire([1, 2])
    cache.reserve(lease, 2)
    cache.publish(lease, [1, 2])
    cache.commit()
    cache.release(lease)

    def fail(event: object) -> None:
        raise MemoryError

    cache.events.append(fail)
    with pytest.raises(MemoryError):  # of `NoCache` nothing is ever evicted
        cache.evict(1) if cache.caches else cache.reset()
    for name, arguments in CHANGES.items():
        with pytest.raises(CacheBroken):
            getattr(cache, name)(*arguments)
    for name, arguments in LOOKS.items():
        getattr(cache, name)(*arguments)
    cache.events.clear()
    cache.recover()
    cache.check()


@pytest.mark.parametrize("kind", CACHES.values())
def test_recovery_keeps_what_was_written_and_what_is_pinned(kind: type[RadixCache]) -> None:
    cache = kind(PagePool(32, 4))
    done, going = cache.acquire(range(8)), cache.acquire(range(8, 20))
    for lease, tokens in ((done, range(8)), (going, range(8, 20))):
        cache.reserve(lease, len(tokens))
        cache.publish(lease, np.array(tokens, np.int32))
        if lease is done:
            cache.commit()
    cache.release(done)
    if cache.caches:
        cache.pin("kept", range(8))
    cache.recover()
    cache.check()
    assert going.released and not cache.broken
    assert cache.cached_length(range(8)) == (8 if cache.caches else 0)
    assert cache.cached_length(range(8, 20)) == 0
    assert cache.pins == ({(None, "kept"): 8} if cache.caches else {})


def test_a_second_thread_is_refused_in_one_sentence() -> None:
    cache = RadixCache(PagePool(8, 4))
    engine = make_engine()
    request = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    with ThreadPoolExecutor(1) as pool:
        refused: list[BaseException | None] = []
        calls = (lambda: cache.acquire([1, 2]), cache.commit, lambda: cache.evict(1))
        cache.events.append(  # in the middle of `publish`
            lambda event: refused.extend(pool.submit(call).exception() for call in calls)
        )
        lease = cache.acquire([1, 2])
        cache.reserve(lease, 2)
        cache.publish(lease, [1, 2])
        assert [type(error) for error in refused] == [WrongThread] * 3
        assert str(refused[0]) == "a cache is for one thread, and another one is changing it"
        cache.check()
        for call in (engine.step, lambda: engine.abort(request)):
            with pytest.raises(WrongThread, match="an engine is for one thread, and another one"):
                pool.submit(call).result()
        finish(engine)
        assert pool.submit(engine.step).result() == []  # no work: it may take over
    assert not cache.broken and request.finished
