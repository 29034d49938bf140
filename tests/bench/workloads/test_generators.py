"""The synthetic workloads share what their docstrings say, and nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from radixcache.bench.schemes.bounds import build_trie, unlimited_hits
from radixcache.bench.workloads.generators import GENERATORS, generate
from radixcache.errors import InvalidRequest


def prompts(workload):
    return [arrival.prompt() for arrival in workload.arrivals]


def common(one, other):
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_gives_the_same_workload_and_another_seed_another(name):
    one, same, other = (prompts(generate(name, seed, 5000)) for seed in (3, 3, 4))
    assert all(map(np.array_equal, one, same))
    assert not all(map(np.array_equal, one, other))


@pytest.mark.parametrize("name", GENERATORS)
def test_every_request_knows_its_lengths_and_waits_for_an_earlier_one(name):
    workload = generate(name, 0, 2000)
    for index, arrival in enumerate(workload.arrivals):
        prompt, answer = arrival.prompt(), arrival.answer()
        assert (len(prompt), len(answer)) == (arrival.prompt_tokens, arrival.answer_tokens)
        assert prompt.dtype == np.int32 and 0 <= prompt.min() <= prompt.max() < 2000
        assert arrival.after is None or arrival.after < index
    assert workload.longest <= 4096  # what the bundled model takes


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_a_turn_begins_with_the_turn_before_and_its_answer(name):
    workload = generate(name, 0, 5000)
    later = [arrival for arrival in workload.arrivals if arrival.after is not None]
    assert later
    for arrival in later:
        before = workload.arrivals[arrival.after or 0]
        assert arrival.turn == before.turn + 1
        said = np.concatenate((before.prompt(), before.answer()))
        assert common(arrival.prompt(), said) == len(said)


def test_chats_share_system_prompts_if_told_how_many_the_first_most_often():
    arrivals = generate("chat:conversations=60,turns=1,system=9,systems=4", 0, 5000).arrivals
    counts = Counter(arrival.prompt()[:9].tobytes() for arrival in arrivals)
    assert len(counts) == 4 and max(counts.values()) > 60 / 4


def test_a_thought_expands_the_one_it_waits_for():
    workload = generate("tree-search:problems=2,branch=2,depth=3", 0, 5000)
    assert len(workload.arrivals) == 2 * (2 + 4 + 8)
    for arrival in workload.arrivals:
        if arrival.after is not None:
            before = workload.arrivals[arrival.after]
            said = np.concatenate((before.prompt(), before.answer()))
            assert np.array_equal(arrival.prompt(), said)


def test_samples_of_one_question_have_one_prompt_and_come_together():
    workload = generate("best-of-n:questions=3,n=4", 0, 5000)
    assert [arrival.together for arrival in workload.arrivals] == [False, True, True, True] * 3
    every = prompts(workload)
    for start in (0, 4, 8):
        assert all(np.array_equal(every[start], other) for other in every[start : start + 4])
        answers = [a.answer()[0] for a in workload.arrivals[start : start + 4]]
        assert len(set(answers)) == 4


def test_nothing_is_shared_where_nothing_is_to_be_shared():
    workload = generate("zero-sharing:requests=90", 0, 100)
    assert unlimited_hits(build_trie(workload)) == 0
    with pytest.raises(InvalidRequest, match="vocabulary of 100"):
        generate("zero-sharing:requests=101", 0, 100)


def test_a_burst_shares_one_stem_that_no_other_burst_has():
    workload = generate("bursts:bursts=3,size=5,stem=100", 0, 50_000)
    every = prompts(workload)
    for index, (one, next_one) in enumerate(pairwise(every)):
        shared = common(one, next_one)
        assert shared >= 50 if (index + 1) % 5 else shared == 0
    assert {a.after for a in workload.arrivals} == {None, 4, 9}


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("chats", "no workload 'chats'; there are chat, few-shot"),
        ("chat:turn=3", "chat has no 'turn'; it has conversations, turns"),
        ("chat:turns=0", "chat: turns must be a positive number, not '0'"),
        ("chat:turns", "chat: turns must be a positive number, not ''"),
        ("chat:write=3", "chat has no 'write'"),
    ],
)
def test_a_workload_that_does_not_exist_is_refused(spec, complaint):
    with pytest.raises(InvalidRequest) as error:
        generate(spec, 0, 100)
    assert complaint in str(error.value)
