"""Workloads from files, and what is said of files that are none."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.workloads import loaders
from radixcache.errors import InvalidRequest


def encode(text):
    return list(text.encode())


def write(tmp_path, *lines, name="file.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


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
        a.prompt() for a in loaders.load_mooncake(path, hash_block=4, vocabulary=1000).arrivals
    )
    assert [len(first), len(second), len(third)] == [8, 6, 4]
    assert np.array_equal(first[:4], second[:4]) and np.array_equal(first[4:], third)
    assert first[4] != second[4] and first.max() < 1000


def test_mooncake_times_are_seconds_and_answers_are_all_different(tmp_path):
    path = write(tmp_path, request(output=9), request(output=0, timestamp=2500))
    workload = loaders.load_mooncake(path, hash_block=4)
    one, other = workload.arrivals
    assert (one.at, other.at) == (1.5, 2.5)
    assert (len(one.answer()), len(other.answer())) == (9, 1)  # an answer has a token
    assert one.answer()[0] != other.answer()[0]
    assert Arrivals(as_recorded=True).due(workload) == [1.5, 2.5]


def test_a_packed_file_and_a_limit_are_read(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(request()) for _ in range(5)).encode()))
    assert len(loaders.load_mooncake(path, hash_block=4, limit=3).arrivals) == 3


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", ":2: not JSON"),
        ({"prompt": "x"}, ":2: not a request of a Mooncake trace"),
        (request(length=0, ids=()), ":2: not a request of a Mooncake trace"),
        (request(ids=("a", "b")), ":2: hash_ids must be numbers"),
        (request(length=9), ":2: 2 hash_ids for 9 tokens: not blocks of 4 (say --hash-block)"),
    ],
)
def test_a_malformed_line_of_a_trace_is_named(tmp_path, line, complaint):
    with pytest.raises(InvalidRequest) as error:
        loaders.load_mooncake(write(tmp_path, request(), line), hash_block=4)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_sharegpt_turns_come_in_rounds_and_wait_for_each_other(tmp_path):
    talk = [("human", "hi"), ("gpt", "hello"), ("human", "more"), ("gpt", "no")]
    chats = [
        {"conversations": [{"from": who, "value": text} for who, text in talk]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]
    workload = loaders.load_sharegpt(write(tmp_path, json.dumps(chats)), encode)
    prompts = [bytes(a.prompt().tolist()) for a in workload.arrivals]
    assert prompts == [b"hi", b"x", b"hihellomore"]
    assert bytes(workload.arrivals[2].answer().tolist()) == b"no"
    assert [(a.after, a.turn) for a in workload.arrivals] == [(None, 0), (None, 0), (0, 1)]


def test_messages_without_an_answer_are_a_prompt(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    answered = [*messages, {"role": "assistant", "content": "A"}]
    path = write(tmp_path, {"messages": messages}, {"messages": answered})
    open_one, closed = loaders.load_messages(path, encode).arrivals
    assert bytes(open_one.prompt().tolist()) == bytes(closed.prompt().tolist()) == b"SU"
    assert open_one.answer_tokens == 128 and bytes(closed.answer().tolist()) == b"A"


def test_plain_prompts_are_lines(tmp_path):
    workload = loaders.load_prompts(write(tmp_path, "one", "", "  ", "two"), encode)
    assert [bytes(a.prompt().tolist()) for a in workload.arrivals] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("load", "text", "complaint"),
    [
        (loaders.load_sharegpt, "[\n{", "not JSON: Expecting property name"),
        (loaders.load_sharegpt, "{}", "not a list of conversations"),
        (loaders.load_sharegpt, "[{}]", 'conversation 0 has no list "conversations"'),
        (loaders.load_sharegpt, '[{"conversations": [{"from": 1}]}]', "conversation 0: a turn"),
        (loaders.load_sharegpt, "[]", "no request in it"),
        (loaders.load_sharegpt, "[" * 100_000, "JSON that is too deep"),
        (loaders.load_messages, "9" * 5000, ":1: JSON that is too deep, or has too long a number"),
        (loaders.load_messages, '{"messages": []}', ":1: not a chat"),
        (loaders.load_messages, '{"messages": [{"role": "user"}]}', ":1: a turn needs"),
        (loaders.load_prompts, "\n\n", "no request in it"),
    ],
)
def test_a_malformed_file_is_named_in_one_sentence(tmp_path, load, text, complaint):
    path = write(tmp_path, text)
    with pytest.raises(InvalidRequest) as error:
        load(path, encode)
    assert str(path) in str(error.value) and complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    packed = tmp_path / "broken.gz"
    packed.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nowhere", packed, binary):
        with pytest.raises(InvalidRequest, match="cannot read"):
            loaders.read_text(path)


def test_a_file_that_is_not_packed_but_called_so_is_named(tmp_path):
    path = tmp_path / "plain.gz"
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot read"):
        loaders.read_text(path)


def test_requests_come_at_the_times_of_the_trace(tmp_path):
    from radixcache.bench.schemes.named import parse_scheme
    from radixcache.runtime.engine.scheduler import Scheduler

    path = write(tmp_path, request(timestamp=0), request(timestamp=10_000, ids=(8, 9)))
    workload = loaders.load_mooncake(path, hash_block=4)
    scheduler = Scheduler(parse_scheme("radix-1").make(100), 64, 8, "fcfs")
    clock = StepClock(0.5)
    found = play(workload, Arrivals(as_recorded=True), IndexEngine(scheduler), clock)
    assert clock.now() == 11.0  # two steps of half a second after the second came
    assert [outcome.ttft for outcome in found] == [0.5, 0.5]
