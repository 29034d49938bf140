"""What the index level sees besides hits, against counts by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest

from radixcache.bench.replay.play import IndexEngine
from radixcache.bench.replay.watch import CacheTime, Survey, WatchedScheduler, survey
from radixcache.bench.schemes.named import parse_scheme


@pytest.mark.parametrize(
    ("scheme", "while_running", "afterwards"),
    [
        ("none", Survey(2, 12), Survey(0, 0)),
        ("prefix-16", Survey(2, 12), Survey(0, 0)),
        ("cow-16", Survey(2, 12), Survey(2, 12)),  # the half-filled page is hashed, too
        ("hash-16", Survey(2, 12), Survey(1, 0)),  # the half-filled page is let go
        ("radix-16", Survey(2, 12), Survey(2, 12)),
        ("radix-1", Survey(20, 0), Survey(20, 0)),
        ("aligned-16", Survey(2, 12), Survey(1, 0)),
    ],
)
def test_a_survey_counts_pages_and_the_slots_that_hold_no_token(scheme, while_running, afterwards):
    scheduler = WatchedScheduler(parse_scheme(scheme).make(256), 512, 8, "fcfs", survey_every=1)
    engine = IndexEngine(scheduler)
    engine.add(np.arange(20, dtype=np.int32), np.array([7], np.int32))
    engine.step()
    assert scheduler.surveys == [while_running]
    assert survey(engine.cache, scheduler.running) == afterwards


def test_a_branch_in_mid_page_shares_no_slot_twice():
    engine = IndexEngine(
        WatchedScheduler(parse_scheme("radix-16").make(256), 512, 8, "fcfs", survey_every=1)
    )
    for last in (100, 200):
        tokens = np.append(np.arange(20), np.arange(last, last + 5)).astype(np.int32)
        engine.add(tokens, np.array([7], np.int32))
        engine.step()
    # 25 tokens over 2 pages, and a copy of the second page with 4 common slots and 5 of its own.
    assert survey(engine.cache, []) == Survey(3, 14)


def test_time_in_the_cache_is_that_of_its_methods():
    cache = parse_scheme("none").make(64)

    def match(tokens, namespace=None):
        end = time.thread_time_ns() + 3_000_000
        while time.thread_time_ns() < end:
            pass
        return 5

    setattr(cache, "match", match)  # noqa: B010 (mypy minds the other way)
    clock = CacheTime(cache)
    for _ in range(100_000):
        pass
    assert clock.seconds == 0
    assert cache.match([1]) == 5 and cache.match([1]) == 5
    assert 0.0055 < clock.seconds < 0.1
