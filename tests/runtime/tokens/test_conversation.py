"""Turns with calls come back as they were generated, or as the template writes them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from radixcache.errors import InvalidRequest
from radixcache.runtime.tokens.conversation import Conversations, thoughts_of
from radixcache.runtime.tokens.history import TokenHistory
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.runtime.tokens.tool_parser import MessageParser
from tests.scripted import make_tokenizer

# Qwen3's way with thoughts: those since the last question are kept, others are dropped.
QWEN3 = """\
{%- set last = namespace(user=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > last.user -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": ' ~ call.function.name | tojson }}
{{- ', "arguments": ' ~ call.function.arguments | tojson ~ '}\n</tool_call>' }}
{%- endfor -%}
<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% if begun %}<think>
{% endif %}{% endif %}"""
QUESTION = {"role": "user", "content": "Why?"}
ANSWER = (
    '<think>\nHm.\n</think>\n\nSo.\n<tool_call>{"name":"f","arguments":{"b":1,"a":[]}}</tool_call>'
)


def make(template: str = QWEN3) -> tuple[Conversations, PreTrainedTokenizerFast]:
    plain = make_tokenizer()
    plain.chat_template = template
    return Conversations(TokenHistory(Tokenizer(plain))), plain


def answer(
    turns: Conversations, plain: PreTrainedTokenizerFast, text: str, **values: Any
) -> tuple[dict[str, Any], str]:
    """The message of an answer to the question, and the text of prompt and answer."""
    prompt = turns.encode([QUESTION], template_kwargs=values)
    tokenizer = turns.history.tokenizer
    begun = bool(thoughts_of(prompt.text))
    parser = MessageParser(tokenizer.tool_format, tokenizer.reasons, begun)
    parser.feed(text, ended=True)
    said = parser.said()
    turns.remember(prompt, plain.encode(text + "<|im_end|>", add_special_tokens=False), said)
    calls = [call.as_template() for call in said.calls]
    return {"role": "assistant", "content": said.content, "tool_calls": calls}, prompt.text + text


def result(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_that_the_client_forgot_are_kept_while_the_template_keeps_them(begun: bool):
    turns, plain = make()
    text = ANSWER.removeprefix("<think>\n") if begun else ANSWER
    message, so_far = answer(turns, plain, text, begun=begun)
    prompt = turns.encode([QUESTION, message, result(message)], template_kwargs={"begun": begun})
    assert prompt.text.startswith(so_far + "<|im_end|>")
    assert prompt.text.count("Hm.") == 1
    # After another question the template drops them, and with them the spelling.
    later = turns.encode([QUESTION, message, result(message), QUESTION]).text
    assert "Hm." not in later
    assert '{"name": "f", "arguments": {"b": 1, "a": []}}' in later


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Otherwise."},
        {"name": "g"},
        {"arguments": {"a": [], "b": 2}},
        {"arguments": {"a": [], "b": 1, "c": None}},
        {"arguments": {"a": [], "b": True}},  # for Python, the same
        {"arguments": {"a": [], "b": 1.0}},
        {"id": "call_unheard"},
        {"cache_salt": "other"},  # ids of calls go to tools and logs: others' thoughts must not
    ],
)
def test_whatever_comes_back_otherwise_is_the_templates(change: dict[str, Any]):
    turns, plain = make()
    message, _ = answer(turns, plain, ANSWER)
    (call,) = message["tool_calls"]
    function = {**call["function"], **{k: v for k, v in change.items() if k in call["function"]}}
    changed = {**call, "id": change.get("id", call["id"]), "function": function}
    message = {**message, "content": change.get("content", "So."), "tool_calls": [changed]}
    messages = [QUESTION, message, result(message)]
    prompt = turns.encode(messages, change.get("cache_salt"))
    assert prompt.text == turns.history.tokenizer.render_chat(messages)


def test_an_answer_that_was_cut_comes_back_as_it_was_read():
    turns, plain = make()
    prompt = turns.encode([QUESTION])
    parser = MessageParser(turns.history.tokenizer.tool_format)
    parser.feed(ANSWER.split("\n\n")[1], ended=True)
    said = parser.said()
    more = ANSWER.split("\n\n")[1] + '\n<tool_call>{"name":"g","arguments":{}}</tool_call>'
    turns.remember(prompt, plain.encode(more, add_special_tokens=False), said)
    calls = [call.as_template() for call in said.calls]
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [QUESTION, message, result(message)]
    assert turns.encode(messages).text == turns.history.tokenizer.render_chat(messages)


def test_many_turns_with_the_same_text_are_each_their_own():
    turns, plain = make()
    spelt = [f'<tool_call>{" " * i}{{"name":"f","arguments":{{}}}}</tool_call>' for i in range(5)]
    messages: list[dict[str, Any]] = [QUESTION]
    for text in spelt:
        message, _ = answer(turns, plain, text)
        messages += [message, result(message)]
    text = turns.encode(messages).text
    assert [text.count(one) for one in spelt] == [1] * 5
    assert sorted(spelt, key=text.index) == spelt


def test_a_template_that_wants_a_call_before_a_result_is_obeyed():
    strict = QWEN3.replace(
        "<|im_start|>{{ m.role }}",
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('whose result?') }}{% endif %}<|im_start|>{{ m.role }}",
    )
    turns, plain = make(strict)
    message, _ = answer(turns, plain, ANSWER)
    messages = [QUESTION, message, result(message)]
    assert '{"name": "f", "arguments": ' in turns.encode(messages).text


def test_the_oldest_turns_are_forgotten():
    turns, plain = make()
    turns.max_bytes = 4 * len(ANSWER) * 3
    messages = [answer(turns, plain, ANSWER)[0] for _ in range(5)]
    stable = ['"name":"f"' in turns.encode([QUESTION, m, result(m)]).text for m in messages]
    assert stable == [False, False, True, True, True]


def test_marks_of_calls_are_text_though_they_are_special():
    plain = make_tokenizer()
    plain.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    ids = plain.encode('<tool_call>{"a"</tool_call><|im_end|>', add_special_tokens=False)
    assert plain.decode(ids, skip_special_tokens=True) == '{"a"'
    assert Tokenizer(plain).decode(ids) == '<tool_call>{"a"</tool_call>'


def calls(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user"}, "'role' and a 'content'"),
        ({"role": "user", "content": None}, "'role' and a 'content'"),
        (calls({}), "a tool call has"),
        ({"role": "assistant", "tool_calls": 5}, "is a list"),
        (calls({"function": {"name": "f", "arguments": '{"a":' + "[" * 100_000}}), "a tool call"),
        (calls({"function": {"name": "f", "arguments": "[1]"}}), "a tool call has"),
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, Any], reason: str):
    turns, _ = make()
    with pytest.raises(InvalidRequest, match=reason):
        turns.encode([QUESTION, message])
