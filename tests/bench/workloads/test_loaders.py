"""Workloads from files, and what is said of files that are none."""

from __future__ import annotations

import json

import pytest

from radixcache.bench.workloads.rendered import load_texts
from tests.bench.workloads.files import CALLED, HISTORY, PLAIN, write


def test_sharegpt_turns_come_in_rounds_and_wait_for_each_other(tmp_path):
    talk = [("human", "hi"), ("gpt", "hello"), ("human", "more"), ("gpt", "no")]
    chats = [
        {"conversations": [{"from": who, "value": text} for who, text in talk]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]
    workload = load_texts(write(tmp_path, json.dumps(chats)), "sharegpt", PLAIN)
    prompts = [bytes(a.prompt().tolist()) for a in workload.arrivals]
    assert prompts == [b"hi", b"x", b"hihellomore"]
    assert bytes(workload.arrivals[2].answer().tolist()) == b"no"
    assert [(a.after, a.turn) for a in workload.arrivals] == [(None, 0), (None, 0), (0, 1)]


def test_messages_without_an_answer_are_a_prompt(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    answered = [*messages, {"role": "assistant", "content": "A"}]
    path = write(tmp_path, {"messages": messages}, {"messages": answered})
    open_one, closed = load_texts(path, "messages", PLAIN).arrivals
    assert bytes(open_one.prompt().tolist()) == bytes(closed.prompt().tolist()) == b"SU"
    assert open_one.answer_tokens == 128 and bytes(closed.answer().tolist()) == b"A"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"messages": HISTORY}),
        json.dumps({"messages": HISTORY}, indent=2),
        json.dumps([{"messages": HISTORY}], indent=2),
        json.dumps(HISTORY, indent=2),
        "\n".join(map(json.dumps, HISTORY)),
        "\ufeff" + json.dumps({"messages": HISTORY}),
    ],
)
def test_a_history_with_tool_calls_is_read_however_it_is_laid_out(tmp_path, text):
    called, answered = load_texts(write(tmp_path, text), "messages", PLAIN).arrivals
    assert bytes(called.prompt().tolist()) == b"SU"
    assert bytes(called.answer().tolist()) == CALLED
    assert bytes(answered.prompt().tolist()) == b"SU" + CALLED + b"R"
    assert bytes(answered.answer().tolist()) == b"A" and answered.after == 0


def test_tools_come_before_the_messages(tmp_path):
    path = write(tmp_path, {"messages": HISTORY[:2], "tools": [{"name": "look"}]})
    (only,) = load_texts(path, "messages", PLAIN).arrivals
    assert bytes(only.prompt().tolist()) == b'[{"name":"look"}]SU'


def test_half_a_character_in_json_is_no_reason_to_stop(tmp_path):
    path = write(tmp_path, r'{"messages": [{"role": "user", "content": "a\ud800b"}]}')
    (only,) = load_texts(path, "messages", PLAIN).arrivals
    assert bytes(only.prompt().tolist()) == b"a?b"


@pytest.mark.parametrize("text", ['["one",\n"two"]', '["one", "two"]', "one\ntwo"])
def test_prompts_may_be_a_json_list_of_texts(tmp_path, text):
    workload = load_texts(write(tmp_path, text), "prompts", PLAIN)
    assert [bytes(a.prompt().tolist()) for a in workload.arrivals] == [b"one", b"two"]


def test_a_prompt_that_begins_with_a_bracket_is_a_prompt(tmp_path):
    lines = ["[INST] one", "{name} asks"]
    workload = load_texts(write(tmp_path, *lines), "prompts", PLAIN)
    assert [bytes(a.prompt().tolist()).decode() for a in workload.arrivals] == lines
