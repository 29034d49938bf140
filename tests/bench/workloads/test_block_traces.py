"""Traces of block hashes: who shares blocks with whom, and who waits for whom."""

from __future__ import annotations

import gzip
import json

import numpy as np

from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.workloads.block_traces import load_trace
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from tests.bench.workloads.files import write


def request(length=5, output=2, ids=(0, 1), timestamp=1500):
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": list(ids),
    }


def test_a_mooncake_block_is_the_same_tokens_wherever_its_id_is(tmp_path):
    path = write(tmp_path, request(8, ids=(7, 3)), "", request(6, ids=(7, 4)), request(4, ids=(3,)))
    first, second, third = (
        a.prompt() for a in load_trace(path, hash_block=4, vocabulary=1000).arrivals
    )
    assert [len(first), len(second), len(third)] == [8, 6, 4]
    assert np.array_equal(first[:4], second[:4]) and np.array_equal(first[4:], third)
    assert first[4] != second[4] and first.max() < 1000


def test_mooncake_times_are_seconds_and_answers_are_all_different(tmp_path):
    path = write(tmp_path, request(output=9), request(output=0, timestamp=2500))
    workload = load_trace(path, hash_block=4)
    one, other = workload.arrivals
    assert (one.at, other.at) == (1.5, 2.5)
    assert (len(one.answer()), len(other.answer())) == (9, 1)  # an answer has a token
    assert one.answer()[0] != other.answer()[0]
    assert Arrivals(as_recorded=True).due(workload) == [1.5, 2.5]
    assert Arrivals(as_recorded=True, speed=2.0).due(workload) == [0.75, 1.25]


def test_a_packed_file_and_a_limit_are_read(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(request()) for _ in range(5)).encode()))
    assert len(load_trace(path, hash_block=4, limit=3).arrivals) == 3


def test_requests_come_at_the_times_of_the_trace(tmp_path):
    path = write(tmp_path, request(timestamp=0), request(timestamp=10_000, ids=(8, 9)))
    workload = load_trace(path, hash_block=4)
    scheduler = Scheduler(parse_scheme("radix-1").make(100), 64, 8, "fcfs")
    clock = StepClock(0.5)
    found = play(workload, Arrivals(as_recorded=True), IndexEngine(scheduler), clock)
    assert clock.now() == 11.0  # two steps of half a second after the second came
    assert [outcome.ttft for outcome in found] == [0.5, 0.5]


def session(name, ids, *, length=None, **more):
    length = len(ids) * 4 if length is None else length
    return {"session_id": name, "input_length": length, "output_length": 3, "hash_ids": ids, **more}


def load(path, **more):
    return load_trace(path, vocabulary=1 << 30, **more).arrivals


def shared(one, other):
    """Tokens with which both prompts begin."""
    one, other = one.prompt(), other.prompt()
    size = min(len(one), len(other))
    same = one[:size] == other[:size]
    return size if same.all() else int(same.argmin())


def test_a_request_waits_for_the_one_before_in_its_session(tmp_path):
    path = write(
        tmp_path,
        session("a", [1, 2], timestamp=1000),
        session("b", [1, 3], timestamp=1500),
        session("a", [1, 2, 4], delay=250),
        session("a", [1, 2, 4, 5], delay=500),
    )
    found = load(path, hash_block=4)
    assert [(a.after, a.turn) for a in found] == [(None, 0), (None, 0), (0, 1), (2, 2)]
    assert [a.at for a in found] == [1.0, 1.5, 1.25, 1.75]
    assert [shared(found[0], other) for other in found[1:]] == [4, 8, 8]
    assert load_trace(path, hash_block=4).shape == "trace of 4-token blocks in 2 sessions"


def test_a_chat_waits_for_its_parent_in_blocks_of_16_tokens(tmp_path):
    chats = [
        {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "hash_ids": [7, 8]},
        {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "hash_ids": [7, 8, 9]},
        {"chat_id": 161, "parent_chat_id": 4, "timestamp": 63, "hash_ids": [7]},
    ]
    sizes = (20, 47, 16)
    rows = [{**c, "input_length": n, "output_length": 0} for c, n in zip(chats, sizes, strict=True)]
    first, second, third = load(write(tmp_path, *rows))
    assert (second.after, second.turn, third.after) == (0, 1, None)
    assert (first.at, second.at) == (61.1, 62.5)
    assert shared(first, second) == 20 and shared(second, third) == 16


def test_an_agents_session_waits_for_its_sub_agents(tmp_path):
    def call(t, ids, **more):
        return {"t": t, "type": "n", "in": 8 * len(ids), "out": 5, "hash_ids": ids, **more}

    one = {
        "id": "trace_1",
        "block_size": 8,
        "hash_id_scope": "local",
        "requests": [
            call(0.0, [1, 2]),
            {"type": "subagent", "t": 1.0, "requests": [call(1.0, [5]), call(2.0, [5, 6])]},
            {"type": "subagent", "t": 1.0, "requests": [call(1.5, [5, 7])]},
            call(3.0, [1, 2, 3]),
        ],
    }
    path = write(tmp_path, json.dumps([one, one], indent=2))  # over many lines
    found = load(path)
    assert [a.after for a in found] == [None, 0, 1, 0, 3, None, 5, 6, 5, 8]
    assert shared(found[0], found[4]) == 16 and shared(found[1], found[3]) == 8
    assert shared(found[0], found[5]) == 0  # ids of one session mean nothing to another
    path = write(tmp_path, *({**one, "hash_id_scope": "global"} for _ in range(2)))
    found = load(path)
    assert shared(found[0], found[5]) == 16


def test_what_no_id_covers_is_shared_with_nobody(tmp_path):
    rows = [session("a", [1], length=7, timestamp=0), session("b", [1], length=7, timestamp=0)]
    rows.append({"session_id": "c", "input_length": 5, "output_length": 1, "timestamp": 0})
    found = load(write(tmp_path, *rows), hash_block=4)
    assert shared(found[0], found[1]) == 4 and shared(found[0], found[2]) == 0
    assert [len(a.prompt()) for a in found] == [7, 7, 5]


def test_ids_of_64_bits_are_told_apart(tmp_path):
    big = 1 << 63
    rows = [session("a", [big, 1], timestamp=0), session("b", [big + (1 << 62), 1], timestamp=0)]
    found = load(write(tmp_path, *rows), hash_block=4)
    assert shared(*found) == 0 and np.array_equal(found[0].prompt()[4:], found[1].prompt()[4:])
