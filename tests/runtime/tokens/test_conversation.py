"""Turns with calls come back as they were generated, or as the template writes them."""

from __future__ import annotations

from typing import Any

import pytest

from radixcache.errors import InvalidRequest
from radixcache.runtime.multimodal.images import NoImages
from radixcache.runtime.tokens.conversation import Conversations, thoughts_of
from radixcache.runtime.tokens.history import TokenHistory
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.runtime.tokens.tool_parser import MessageParser
from tests.helpers.scripted import make_tokenizer

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


class Talk(Conversations):
    """Conversations of a scripted model."""

    def __init__(self, template: str = QWEN3) -> None:
        self.plain = make_tokenizer()
        self.plain.chat_template = template
        super().__init__(TokenHistory(Tokenizer(self.plain)), NoImages("no images"))

    def answered(self, text: str, more: str = "", **values: Any) -> list[dict[str, Any]]:
        """The question, `text` as its answer, and a result; `more` was generated, and cut off."""
        prompt = self.encode([QUESTION], template_kwargs=values)
        tokenizer = self.history.tokenizer
        begun = bool(thoughts_of(prompt.text))
        parser = MessageParser(tokenizer.tool_format, tokenizer.reasons, begun)
        parser.feed(text, ended=True)
        said = parser.message()
        ids = self.plain.encode(text + (more or "<|im_end|>"), add_special_tokens=False)
        self.remember(prompt, ids, said)
        calls = [call.as_template() for call in said.calls]
        message = {"role": "assistant", "content": said.content, "tool_calls": calls}
        return [QUESTION, message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "7"}]


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_that_the_client_forgot_are_kept_while_the_template_keeps_them(begun: bool):
    talk = Talk()
    text = ANSWER.removeprefix("<think>\n") if begun else ANSWER
    messages = talk.answered(text, begun=begun)
    asked = talk.encode([QUESTION], template_kwargs={"begun": begun}).text
    prompt = talk.encode(messages, template_kwargs={"begun": begun})
    assert prompt.text.startswith(f"{asked}{text}<|im_end|>")
    assert prompt.text.count("Hm.") == 1
    # After another question the template drops them, and with them the spelling.
    later = talk.encode([*messages, QUESTION]).text
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
    talk = Talk()
    question, message, result = talk.answered(ANSWER)
    (call,) = message["tool_calls"]
    function = {**call["function"], **{k: v for k, v in change.items() if k in call["function"]}}
    changed = {**call, "id": change.get("id", call["id"]), "function": function}
    message = {**message, "content": change.get("content", "So."), "tool_calls": [changed]}
    messages = [question, message, {**result, "tool_call_id": changed["id"]}]
    prompt = talk.encode(messages, change.get("cache_salt"))
    assert prompt.text == talk.history.tokenizer.render_chat(messages)


def test_an_answer_that_was_cut_comes_back_as_it_was_read():
    talk, more = Talk(), '\n<tool_call>{"name":"g","arguments":{}}</tool_call>'
    messages = talk.answered(ANSWER.split("\n\n")[1], more)
    assert talk.encode(messages).text == talk.history.tokenizer.render_chat(messages)


def test_many_turns_with_the_same_text_are_each_their_own():
    talk = Talk()
    spelt = [f'<tool_call>{" " * i}{{"name":"f","arguments":{{}}}}</tool_call>' for i in range(5)]
    answers = [message for text in spelt for message in talk.answered(text)[1:]]
    text = talk.encode([QUESTION, *answers]).text
    assert [text.count(one) for one in spelt] == [1] * 5
    assert sorted(spelt, key=text.index) == spelt


def test_a_template_that_wants_a_call_before_a_result_is_obeyed():
    strict = QWEN3.replace(
        "<|im_start|>{{ m.role }}",
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('whose result?') }}{% endif %}<|im_start|>{{ m.role }}",
    )
    talk = Talk(strict)
    assert '{"name": "f", "arguments": ' in talk.encode(talk.answered(ANSWER)).text


def test_the_oldest_turns_are_forgotten():
    talk = Talk()
    talk.max_bytes = 4 * len(ANSWER) * 3
    conversations = [talk.answered(ANSWER) for _ in range(5)]
    stable = ['"name":"f"' in talk.encode(messages).text for messages in conversations]
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
        (calls({"function": {"name": "f", "arguments": [1]}}), "a tool call has"),
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, Any], reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        Talk().encode([QUESTION, message])
