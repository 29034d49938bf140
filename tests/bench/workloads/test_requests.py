"""A gateway's log: each body is one request, whatever its history, and what is said of others."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from radixcache.bench.workloads.rendered import Templated, load_texts
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.cli import main
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.bench.workloads.files import CALLED, HISTORY, PLAIN, write

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def body(*messages, **more):
    return {"model": "m", "messages": [*messages], **more}


def read(tmp_path, *records, renderer=PLAIN, **more):
    return load_texts(write(tmp_path, *records), "requests", renderer, **more).arrivals


def texts(arrivals):
    return [bytes(a.prompt().tolist()).decode() for a in arrivals]


def said(arrival):
    return bytes(arrival.answer().tolist())


def test_a_body_is_one_request_with_its_whole_history(tmp_path):
    first, other, second = (user("a"),), (user("x"),), (user("a"), answer("b"), user("c"))
    found = read(tmp_path, body(*first), body(*other), body(*second, max_tokens=7))
    assert texts(found) == ["a", "x", "abc"]
    assert [(a.after, a.turn) for a in found] == [(None, 0), (None, 0), (0, 1)]
    assert said(found[0]) == b"b", "the next request holds it"
    assert [a.answer_tokens for a in found[1:]] == [128, 7]
    assert texts(read(tmp_path, body(*first), body(*second), limit=1)) == ["a"]


def test_max_tokens_bounds_an_answer_that_nobody_knows(tmp_path):
    bodies = [body(user("a"), max_tokens=most) for most in (9, 0, None, 4096)]
    bodies += [body(user("a"), max_completion_tokens=5, max_tokens=9)]
    assert [a.answer_tokens for a in read(tmp_path, *bodies)] == [9, 1, 128, 128, 5]


@pytest.mark.parametrize("key", ["body", "request"])
def test_a_body_may_be_wrapped_and_its_answer_beside_it(key, tmp_path):
    asked, choice = body(user("a"), max_tokens=3), {"message": answer("said so")}
    called = {"message": HISTORY[2]}
    completion = {"choices": [{"text": "text"}]}
    found = read(
        tmp_path,
        {key: asked, "response": {"choices": [choice]}},
        {key: json.dumps(asked), "response": json.dumps({"choices": [choice]})},
        {key: {"body": asked}, "response": {"status_code": 200, "body": {"choices": [called]}}},
        {key: {"model": "m", "prompt": "a"}, "response": completion},
        {key: asked, "response": {"usage": {"completion_tokens": 200}}},
        {key: asked, "response": None, "error": "none came"},
    )
    assert set(texts(found)) == {"a"}
    assert [said(a) for a in found[:4]] == [b"said so", b"said so", CALLED, b"text"]
    assert [a.answer_tokens for a in found[4:]] == [200, 3]


def test_requests_come_in_the_order_of_the_file_or_of_their_times(tmp_path):
    times = ["2026-01-31T12:00:01Z", "2026-01-31T12:00:00.5+00:00", 1]
    lines = [{"timestamp": at, "body": body(user(str(n)))} for n, at in enumerate(times)]
    assert texts(read(tmp_path, *lines)) == ["2", "1", "0"]
    unreadable: object
    for unreadable in (None, "soon", {}):
        lines[1]["timestamp"] = unreadable
        assert texts(read(tmp_path, *lines)) == ["0", "1", "2"]


def test_two_models_share_nothing(tmp_path):
    found = read(tmp_path, *(body(user("abc"), model=name) for name in "xyx"))
    assert [a.prompt()[0] for a in found] == [0, 1, 0]
    assert all(a.prompt()[1:].tolist() == list(b"abc") for a in found)


def test_a_prompt_may_be_token_ids(tmp_path):
    (only,) = read(tmp_path, {"model": "m", "prompt": [7, 8, 70_000]})
    assert only.prompt().tolist() == [7, 8, 70_000]


def test_the_chat_template_of_the_model_renders_tools_and_history(tmp_path):
    tokenizer = Tokenizer.load(str(BUNDLED_MODEL))
    assert tokenizer is not None
    messages = [{"role": "developer", "content": "S"}, *HISTORY[1:], user("more")]
    bodies = [body(*messages[:end], tools=[TOOL]) for end in (2, 4, 6)]
    found = read(tmp_path, *bodies, renderer=Templated(tokenizer))
    shown = [tokenizer.show(a.prompt().tolist()) for a in found]
    called = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    assert shown[0].startswith("<|system|>S\n# Tools\n") and '"look"' in shown[0]
    assert shown[0].endswith("<|user|>U<|end|><|assistant|>")
    assert shown[1] == f"{shown[0]}{called}<|end|><|tool|>R<|end|><|assistant|>"
    assert tokenizer.show(found[0].answer().tolist()) == f"{called}<|end|>"
    assert [a.after for a in found] == [None, 0, 1]
    for before, after in pairwise(found):
        kept = before.tokens()
        assert after.prompt()[: len(kept)].tolist() == kept.tolist(), "what it hits"


@pytest.mark.parametrize(
    "line", [{"messages": [user("a")]}, {"model": "m", "messages": [user("a"), answer("b")]}]
)
def test_conversations_are_no_log(line, tmp_path, capsys):
    path = write(tmp_path, line)
    words = ["--format", "messages", "--schemes", "radix-1", "--memory", "300", "--json", "-"]
    assert main(["bench", "--file", str(path), *words]) == 0
    assert json.loads(capsys.readouterr().out)["workloads"][0]["requests"] == 1
