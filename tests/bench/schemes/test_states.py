"""Where a hybrid model's states are kept: counts by hand, and that KV alone is the bound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.schemes.named import HYBRID, Scheme
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from tests.bench.replay.random_play import random_workload
from tests.helpers.cover import covering

RULES = [scheme.states for scheme in HYBRID]


def texts(*lengths):
    """Texts of these lengths, no two of which have a token in common."""
    ends = np.cumsum((0, *lengths))
    return [np.arange(start, end, dtype=np.int32) for start, end in pairwise(ends)]


def questions(document, question=30):
    """Three questions on one document."""
    text, *asked, answer = texts(document, question, question, question, 2)
    workload = Workload("questions", "")
    for said in asked:
        workload.add([text, said], answer, template=1)
    return workload


def conversation(answer):
    """A prompt of 100 tokens, its answer, and 20 tokens more."""
    first, said, second = texts(100, answer, 20)
    workload = Workload("conversation", "")
    workload.add([first], said)
    workload.add([first, said, second], said, after=0)
    return workload


def turns():
    """Three conversations take turns, three each, that add 10 tokens and an answer of 6."""
    workload = Workload("turns", "")
    fresh = texts(*[10, 6] * 9)
    for turn in range(3):
        for chat in range(3):
            *said, answer = fresh[6 * chat :][: 2 * turn + 2]
            workload.add(said, answer)
    return workload


class CheckedScheduler(Scheduler):
    """No step writes a slot twice, or keeps a state in the slot that it reads."""

    def schedule(self):
        chunks = super().schedule()
        states = [chunk.states for chunk in chunks if chunk.states is not None]
        written = [slot for s in states for slot in (s.write, *(slot for _, slot in s.keeps))]
        assert len(set(written)) == len(written)
        assert not {s.read for s in states} & {slot for s in states for _, slot in s.keeps}
        return chunks


def replay(workload, rule, states, concurrency=1, budget=64):
    """What became of the requests, and the slots."""
    scheme = Scheme("radix", 1, rule)
    cache, planner = scheme.make_planned(1 << 14, states, workload)
    scheduler = CheckedScheduler(cache, budget, min(8, states - 1), "fcfs", planner)

    def check():
        cache.check()
        planner.check(scheduler.running)

    outcomes = play(
        workload, Arrivals(concurrency=concurrency), IndexEngine(scheduler), StepClock(1.0), check
    )
    assert not any(outcome.error for outcome in outcomes)
    return outcomes, getattr(planner, "index", None)


def computed(workload, rule, states=64, budget=2048):
    return sum(o.computed_tokens for o in replay(workload, rule, states, budget=budget)[0])


@pytest.mark.parametrize(
    ("rule", "short", "long", "chat", "long_chat", "same", "kept"),
    [
        # The document once and three questions; what has KV of an answer is one token less.
        ("kv-alone", 100 + 90, 600 + 90, 100 + 21, 100 + 21, 100 + 1 + 1, 0),
        # Kept after each document, before the end of each prompt and after each answer.
        ("ours", 100 + 90, 600 + 90, 100 + 21, 100 + 21, 100 + 1 + 1, 2 + 4 + 4),
        # Nobody says where the document ends, so the second question shows it, from the state on
        # that was left 128 tokens before the first prompt's end.
        ("ours-untold", 200 + 90, 630 + 128 + 30, 100 + 21, 100 + 21, 100 + 2 + 2, 2 + 4 + 4),
        ("marconi", 200 + 90, 1200 + 90, 100 + 21, 100 + 21, 100 + 100 + 1, 2 + 4),
        # Ends of prompts and answers alone: not where questions part, nor before a prompt's end.
        ("sglang", 300 + 90, 1800 + 90, 100 + 21, 100 + 21, 3 * 100, 4 + 4),
        # 128 of the first prompt, of the second 64 in its place; of 630 tokens 576 at once.
        ("sglang-64", 130 + 130 + 66, 630 + 54 + 54, 100 + 97, 100 + 109, 100 + 36 + 36, 2 + 1),
        ("vllm-528", 300 + 90, 630 + 102 + 102, 100 + 161, 100 + 93, 3 * 100, 0),
    ],
)
def test_each_rule_computes_what_it_finds_no_state_for(
    rule, short, long, chat, long_chat, same, kept
):
    asked = [questions(100), questions(600), conversation(41), conversation(501)]
    asked.append(questions(100, 0))  # one prompt three times
    found = [computed(workload, rule) for workload in asked]
    assert found == [short, long, chat, long_chat, same]
    text, *others, answer = texts(70, 40, 40, 2)
    both = Workload("two questions on each of two documents", "", asked[0].arrivals[:2])
    for question in others:
        both.add([text[::-1], question], answer, template=1)
    _, index = replay(both, rule, 1000, budget=2048)
    assert kept == (index.counts["kept"] if index else 0)


QUESTIONS, TURNS = questions(600), turns()


@pytest.mark.parametrize(
    ("workload", "rule", "states", "prefilled"),
    [
        # Prefilled in chunks of 256: a state at the end of each, or at the last point of a grid.
        (QUESTIONS, "sglang", 64, 630 + (630 - 512) * 2),
        (QUESTIONS, "sglang-64", 64, 630 + (630 - 576) * 2),
        (QUESTIONS, "vllm-528", 64, 630 + (630 - 528) * 2),
        (QUESTIONS, "ours", 64, 600 + 90),
        # What a conversation went on from goes first: a state for each, and two to work with.
        (TURNS, "ours", 5, 3 * (10 + 11 + 11)),
        (TURNS, "marconi", 5, 3 * (10 + 11 + 11)),
        # By LRU two states of each turn drive out those of the next conversation, but the first's.
        (TURNS, "sglang", 5, (10 + 11 + 11) + 2 * (10 + 26 + 42)),
        (TURNS, "sglang", 8, 3 * (10 + 11 + 11)),
    ],
)
def test_what_chunks_leave_and_what_is_evicted(workload, rule, states, prefilled):
    assert computed(workload, rule, states, budget=256) == prefilled


def test_one_slot_less_than_there_are_may_be_taken_by_running_requests():
    workload = generate("documents:documents=3,questions=20,document=200", 0, 1 << 15)
    ours, at_once = Scheme("radix", 1, "ours"), Arrivals(concurrency=9)
    many, three = (Serving(at_once, max_num_seqs=most, states=4) for most in (64, 3))
    hits = [run_index(workload, ours, 1 << 14, serving).hits for serving in (many, three)]
    assert hits[0] == hits[1]


@covering(seed=range(6), rule=RULES[1:], states=[2, 5, 20, 1000])
def test_what_no_rule_finds_is_what_kv_alone_leaves_and_what_is_computed_again(seed, rule, states):
    workload = random_workload(seed)
    least, _ = replay(workload, "kv-alone", 2)
    for alone, found in zip(least, replay(workload, rule, states)[0], strict=True):
        assert found.hit_tokens + found.recomputed_tokens == alone.hit_tokens
        assert found.computed_tokens - found.recomputed_tokens == alone.computed_tokens
    for found in replay(workload, rule, states, concurrency=4)[0]:
        assert found.hit_tokens + found.computed_tokens >= found.prompt_tokens


@pytest.mark.parametrize("name", ["chat:conversations=6,turns=4", "agents:agents=5,steps=5"])
def test_with_states_enough_ours_computes_what_kv_alone_leaves(name):
    """Told where templates end, all of it; else each template is computed twice, from the state on
    that is kept 128 tokens before the end of a longer prompt."""
    workload = generate(name, 0, 1 << 15)
    (template,) = workload.templates()
    alone = computed(workload, "kv-alone")
    assert computed(workload, "ours", 1000) == alone
    near = workload.arrivals[0].prompt_tokens - 128
    again = len(template) - (near if near >= 128 else 0)
    assert computed(workload, "ours-untold", 1000) == alone + again
