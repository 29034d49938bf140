"""Files that are not what they are said to be: one sentence, with the file and the line."""

from __future__ import annotations

import gzip
import json

import pytest

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.cli import main

LINE = {"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [0, 1]}
ASK = {"role": "user", "content": "a"}
BODY = {"model": "m", "messages": [ASK], "max_tokens": 9}


def lines(*records):
    return "\n".join(json.dumps(record) for record in records)


TABLE = [
    # (format, text, complaint)
    ("mooncake", lines(LINE) + "\n{", ":2: not JSON"),
    ("mooncake", lines({"prompt": "x"}), ":1: not a request of a trace"),
    ("mooncake", lines({**LINE, "input_length": 0}), ":1: no number of tokens in its prompt: 0"),
    ("mooncake", lines({**LINE, "input_length": True}), "no number of tokens in its prompt: True"),
    ("mooncake", lines({**LINE, "output_length": 1 << 40}), "in its answer: 1099511627776"),
    ("mooncake", lines({**LINE, "timestamp": float("inf")}), "a time must be a number from 0 to"),
    ("mooncake", lines({**LINE, "timestamp": int("9" * 400)}), "a time must be a number"),
    ("mooncake", lines({**LINE, "timestamp": "now"}), "a time must be a number from 0 to 1e+15"),
    ("mooncake", lines({**LINE, "hash_ids": 7}), ":1: hash_ids must be numbers"),
    ("mooncake", lines({**LINE, "hash_ids": ["a"]}), ":1: hash_ids must be numbers"),
    ("mooncake", lines({**LINE, "input_length": 13}), "not blocks of 4 (say --hash-block)"),
    ("sessions", "", "no request in it"),
    ("sessions", lines({"input_length": 1}), ":1: not a request of a trace"),
    ("sessions", lines({"requests": [7]}), ':1: a request of a session needs "in" and "out"'),
    ("sessions", lines({"requests": [{"in": 5, "out": 1, "hash_ids": [1] * 3}]}), "3 hash_ids for"),
    ("sessions", lines({"session_id": [], "input_length": 1, "output_length": 1}), ":1: not a req"),
    ("sessions", "[" * 5000, "JSON that is too deep"),
    ("sessions", '{"requests":[{"type":"subagent",' * 900, "not JSON"),
    ("sharegpt", "[\n{", "not JSON: Expecting property name"),
    ("sharegpt", "{}", "not a list of conversations"),
    ("sharegpt", "[{}]", 'conversation 0 has no list "conversations"'),
    ("sharegpt", '[{"conversations": [{"from": 1}]}]', "conversation 0: a turn"),
    ("sharegpt", "[]", "no request in it"),
    ("messages", "9" * 5000, ":1: JSON that is too deep, or has too long a number"),
    ("messages", lines({"messages": []}), ":1: not a chat"),
    ("messages", lines({"messages": [{"role": "user", "content": 7}]}), ':1: a turn needs "role"'),
    ("messages", lines({"messages": [{**ASK, "content": [7]}]}), ":1: a part of a content"),
    ("messages", lines({"messages": [{**ASK, "tool_calls": 7}]}), '"tool_calls" must'),
    ("messages", '{"messages": [\n7\n]}', "record 0: a turn needs"),
    ("messages", "[7,\n8]", "record 0: not a chat"),
    ("messages", "x" * 1_000_000, ":1: not JSON"),
    ("prompts", "\n\n", "no request in it"),
    ("prompts", json.dumps({"messages": [ASK]}, indent=2), "JSON, not a prompt a line"),
    ("prompts", lines({"prompt": "a"}, {"prompt": "b"}), "JSON, not a prompt a line"),
    ("prompts", "[\n  {\n", "not JSON"),
    ("requests", lines(BODY, 7), ":2: no request: a body has"),
    ("requests", lines({"input": "x", "model": "m"}), ":1: no request: a body has"),
    ("requests", lines({"body": "text"}), ":1: no request: a body has"),
    ("requests", lines({"messages": []}), ':1: no request: a body has a list of "messages"'),
    ("requests", lines({"prompt": ["a", "b"]}), ":1: no request: a body has"),
    ("requests", lines({"prompt": [1, -1]}), ":1: no request: a body has"),
    ("requests", lines({**BODY, "system": "s"}), ':1: "system" beside "messages"'),
    ("requests", lines({**BODY, "messages": [{"role": "user"}]}), ":1: a turn needs"),
    ("requests", lines({**BODY, "tools": "look"}), ':1: "tools" are a list'),
    ("requests", lines({**BODY, "max_tokens": -1}), '"max_tokens" a number from 0 on'),
    ("requests", lines({**BODY, "messages": [{**ASK, "content": ""}]}), "a prompt without a token"),
    ("messages", lines(BODY, BODY), "say --format requests"),
    ("mooncake", lines({"body": {"messages": [ASK]}}), "say --format requests"),
]


@pytest.mark.parametrize(("kind", "text", "complaint"), TABLE)
def test_a_file_that_is_none_is_named_in_one_sentence(kind, text, complaint, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(text)
    words = ["--hash-block", "4"] if kind in ("mooncake", "sessions") else []
    assert main(["bench", "--file", str(path), "--format", kind, "--json", "-", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("radixcache: error: ") and str(path) in said.err
    assert complaint in said.err and said.err.count("\n") == 1 and len(said.err) < 400
    assert not said.out


@pytest.mark.parametrize("kind", ["mooncake", "sharegpt", "prompts", "requests"])
def test_what_cannot_be_read_is_named(kind, tmp_path, capsys):
    packed = gzip.compress(b"x" * 1000)[:-9]
    for name, data in (("nowhere", None), ("half.gz", packed), ("binary", b"\xff\xfe")):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        assert main(["bench", "--file", str(path), "--format", kind, "--json", "-"]) == 2
        assert f"cannot read {path}" in capsys.readouterr().err


def test_what_the_template_refuses_is_told_with_its_line(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text(lines(BODY, {**BODY, "tools": [{"name": "look"}]}))
    words = ["--format", "requests", "--model", str(BUNDLED_MODEL), "--json", "-"]
    assert main(["bench", "--file", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert f"{path}:2: a tool is" in error and error.count("\n") == 1
