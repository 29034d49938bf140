"""Each rule on standings made for it."""

from __future__ import annotations

from random import Random

import pytest

from radixcache.bench.schemes.routing import RULES, Asked
from radixcache.runtime.router.policy import QUEUED, Standing


def chosen(rule: str, *standings: tuple[int, int, int], session: int = 0, seed: int = 0) -> int:
    """Which of the replicas with (cached, queued, requests) a prompt of 100 tokens goes to."""
    rows = [
        Standing(n, 100, cached, queued, requests, last=n, cost=100 - cached + QUEUED * queued)
        for n, (cached, queued, requests) in enumerate(standings)
    ]
    found = RULES[rule](Asked(rows, session, Random(seed))).replica
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_serves_one_replica_and_says_what_it_does(rule: str) -> None:
    assert chosen(rule, (0, 5, 5)) == 0
    assert RULES[rule].__doc__


def test_cost_takes_the_least_of_what_is_to_compute_and_most_of_what_is_queued() -> None:
    assert chosen("cost", (90, 101, 1), (0, 0, 9), (50, 60, 0)) == 1
    assert chosen("cost", (90, 99, 1), (0, 0, 9)) == 0
    assert chosen("cost", (0, 0, 2), (0, 0, 1)) == 1


def test_rules_that_know_no_cache() -> None:
    assert chosen("least-queued", (99, 7, 0), (0, 6, 9)) == 1
    assert [chosen("session", (99, 7, 0), (0, 6, 9), session=n) for n in range(4)] == [0, 1, 0, 1]
    both = {chosen("random", (0, 0, 0), (0, 0, 99), seed=n) for n in range(20)}
    assert both == {0, 1}
    pairs = {chosen("two-choices", (0, 0, 1), (0, 0, 2), (0, 0, 3), seed=n) for n in range(40)}
    assert pairs == {0, 1}  # the most loaded of three never wins


def test_sglang_leaves_the_match_at_its_three_numbers() -> None:
    assert chosen("sglang", (31, 0, 64), (0, 0, 0)) == 0
    assert chosen("sglang", (30, 0, 64), (0, 0, 0)) == 1  # no more than 0.3
    assert chosen("sglang", (31, 0, 65), (0, 0, 0)) == 1  # more than 64 apart
    assert chosen("sglang", (31, 0, 195), (0, 0, 130)) == 0  # but not more than 1.5 times
    assert chosen("sglang", (31, 0, 196), (0, 0, 130)) == 1


def test_aibrix_leaves_the_match_if_it_is_far_busier_than_the_others() -> None:
    idle = [(0, 0, 0)] * 7
    assert chosen("aibrix", (5, 0, 16), (0, 0, 0)) == 0
    assert chosen("aibrix", (5, 0, 17), (0, 0, 0)) == 1
    assert chosen("aibrix", (5, 0, 10), *idle) == 1  # beyond two standard deviations
    assert chosen("aibrix", (0, 0, 3), (0, 0, 2)) == 1


def test_llm_d_adds_the_share_cached_and_the_load_in_its_weights() -> None:
    assert chosen("llm-d", (70, 0, 9), (0, 0, 1)) == 0
    assert chosen("llm-d", (60, 0, 9), (0, 0, 1)) == 1
    assert chosen("llm-d", (10, 0, 5), (20, 0, 5)) == 1
