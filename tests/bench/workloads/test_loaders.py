"""Workloads from files, and what is said of files that are none."""

from __future__ import annotations

import gzip
import json

import pytest

from radixcache.bench.workloads import loaders
from radixcache.bench.workloads.records import read_text
from radixcache.errors import InvalidRequest


def encode(text):
    return list(text.encode())


def write(tmp_path, *lines, name="file.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


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
            read_text(path)


def test_a_file_that_is_not_packed_but_called_so_is_named(tmp_path):
    path = tmp_path / "plain.gz"
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_text(path)


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
HISTORY = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "image_url"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "R"},
    {"role": "assistant", "content": "A"},
]
CALLED = b'{"name":"look","arguments":"{\\"at\\": 1}"}'


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
    called, answered = loaders.load_messages(write(tmp_path, text), encode).arrivals
    assert bytes(called.prompt().tolist()) == b"SU"
    assert bytes(called.answer().tolist()) == CALLED
    assert bytes(answered.prompt().tolist()) == b"SU" + CALLED + b"R"
    assert bytes(answered.answer().tolist()) == b"A" and answered.after == 0


def test_tools_come_before_the_messages(tmp_path):
    path = write(tmp_path, {"messages": HISTORY[:2], "tools": [{"name": "look"}]})
    (only,) = loaders.load_messages(path, encode).arrivals
    assert bytes(only.prompt().tolist()) == b'[{"name":"look"}]SU'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"messages": [{"role": "user", "content": 7}]}', ':1: a turn needs "role"'),
        ('{"messages": [{"role": "user", "content": [7]}]}', ":1: a part of a content"),
        ('{"messages": [{"role": "x", "content": null, "tool_calls": 7}]}', '"tool_calls" must'),
        ('{"messages": [\n7\n]}', "record 0: a turn needs"),
        ("[7,\n8]", "record 0: not a chat"),
        ('[\n{"messages":', "not JSON"),
        ("", "no request in it"),
        ("\ud800", None),
        ("x" * 1_000_000, ":1: not JSON"),
    ],
)
def test_a_malformed_history_is_named_in_one_sentence(tmp_path, text, complaint):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(InvalidRequest) as error:
        loaders.load_messages(path, encode)
    assert (complaint or "it is not UTF-8 text") in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_half_a_character_in_json_is_no_reason_to_stop(tmp_path):
    path = write(tmp_path, r'{"messages": [{"role": "user", "content": "a\ud800b"}]}')
    (only,) = loaders.load_messages(path, encode).arrivals
    assert bytes(only.prompt().tolist()) == b"a?b"


@pytest.mark.parametrize("text", ['["one",\n"two"]', '["one", "two"]', "one\ntwo"])
def test_prompts_may_be_a_json_list_of_texts(tmp_path, text):
    workload = loaders.load_prompts(write(tmp_path, text), encode)
    assert [bytes(a.prompt().tolist()) for a in workload.arrivals] == [b"one", b"two"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"messages": HISTORY}, indent=2),
        json.dumps([{"messages": HISTORY}], indent=1),
        "\n".join(json.dumps({"prompt": prompt}) for prompt in "ab"),
        "[\n  {\n",
        "{",
    ],
)
def test_json_is_not_taken_for_prompts_line_by_line(tmp_path, text):
    with pytest.raises(InvalidRequest) as error:
        loaders.load_prompts(write(tmp_path, text), encode)
    assert "JSON" in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_that_begins_with_a_bracket_is_a_prompt(tmp_path):
    lines = ["[INST] one", "{name} asks"]
    workload = loaders.load_prompts(write(tmp_path, *lines), encode)
    assert [bytes(a.prompt().tolist()).decode() for a in workload.arrivals] == lines


HOSTILE = {
    "empty": b"",
    "binary": bytes(range(256)),
    "packed.gz": gzip.compress(b'{"messages": []}' * 99)[:-9],
    "line": b"[" + b"x" * 1_000_000,
    "types": b'{"messages": 5, "requests": 7, "hash_ids": {}}\n{}',
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("kind", ["mooncake", "sessions", "sharegpt", "messages", "requests"])
def test_a_hostile_file_ends_the_command_in_one_sentence(tmp_path, capsys, what, kind):
    from radixcache.runtime.cli import main

    path = tmp_path / what
    path.write_bytes(HOSTILE[what])
    assert main(["bench", "--file", str(path), "--format", kind, "--json", "-"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("radixcache: error: ") and str(path) in said.err
    assert said.err.count("\n") == 1 and len(said.err) < 400 and not said.out
