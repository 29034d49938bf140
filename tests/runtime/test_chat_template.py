"""Chat templates render as transformers renders them, whose renderer is not imported to serve."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radixcache.runtime.checkpoints.chat_template import render
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from tests.helpers.scripted import CHAT_TEMPLATE

TEMPLATES = {
    "bundled": (BUNDLED_MODEL / "chat_template.jinja").read_text(),
    "scripted": CHAT_TEMPLATE,
    "everything": """
        {%- set names = namespace(seen=0, self=1) %}{% set marks = dict(a=1).copy() %}
        {% for m in messages if m.role != 'tool' %}
            {% if m.content is none or m.content is undefined %}{% continue %}{% endif %}
            {% set names.seen = names.seen + 1 %}{%- if names.seen > 4 %}{% break %}{% endif %}
            {%- if m.content is string -%}{{ m.content | trim }}
            {%- else %}{{ m.content[0].text }}{% endif %}
            {%- generation %}{% set names.seen = 0 + names.seen %}[{{ m.role }}]{% endgeneration %}
            {{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}
        {% endfor %}
        {{ tools | tojson(indent=1) }}{{ {'b': '<é>', 'a': 1.5} | tojson }}
        {{ marks }}{{ documents }}
        {{ {'b': 2, 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}
        {{ dict.fromkeys(['x']) }}{{ strftime_now('%Y') | length }}{{ bos_token }}{{ more }}
        {% if add_generation_prompt %}Answer:{% endif %}""",
    "by position": "{{ ['é'] | tojson(true, 1) }}{{ [1, 2] | tojson(false, none, [';', '=']) }}",
    "sorted": "{{ {'b': 1, 'a': 2} | tojson(false, none, none, true) }}",
    "called": "{{ [joiner] | tojson(default=raise_exception) }}",
    "constructed": "{{ [1] | tojson(cls=cycler) }}",
    "keys": "{{ {(1, 2): 1} | tojson(skipkeys=true) }}",
    "clock": "{{ strftime_now(format='%Y') }}",
    "kept": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
    "refuses": "{{ raise_exception('no such order') }}",
    "leaves": "{{ messages.append.__globals__ }}",
    "changes": "{% set _ = messages.append(1) %}{{ messages | length }}",
    "underscored": "{% set n = namespace(_x=1) %}{{ n._x }}",
    "sets": "{% set n = namespace() %}{% set n._x = 1 %}",
    "broken": "{% for %}",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " Grüße <b>\n"}],
    "turns": [
        {"role": "system", "content": "Rules"},
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "said ", "reasoning": "thought", "tool_calls": None},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "part "}]}],
    "thinking": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "x", "thinking": "b", "reasoning_content": "a"},
    ],
    "no text": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}],
    "calls": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "result", "name": "f"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}]


def theirs(template: str, chat: list[dict[str, Any]], tools: Any, ask: bool, on: bool) -> str:
    chat = [{k: v for k, v in message.items() if v is not None} for message in chat]
    told: Any = render_jinja_template(
        [chat],
        tools=tools,
        chat_template=template,
        add_generation_prompt=ask,
        continue_final_message=on,
        bos_token="<s>",
        more=[1, {"a": None}],
    )
    return str(told[0][0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_a_template_gives_what_transformers_gives_or_fails_as_there(name: str, chat: str) -> None:
    for tools, ask, on in product((None, TOOLS), (False, True), (False, True)):
        given, failure = (TEMPLATES[name], CHATS[chat], tools), None
        values = {"bos_token": "<s>", "more": [1, {"a": None}]}
        try:
            expected = theirs(*given, ask, on)
        except Exception as error:
            failure = error
        if failure is None:
            assert expected == render(*given, ask=ask, continue_final=on, values=values)
            continue
        with pytest.raises(Exception) as failed:  # noqa: PT011 - of any kind
            render(*given, ask=ask, continue_final=on, values=values)
        if not on:  # a message that cannot go on has sentences of our own
            assert type(failed.value) is type(failure)
        if name == "refuses" and not on:
            assert str(failed.value) == str(failure) == "no such order"


def test_what_json_cannot_say_and_no_messages_at_all_are_refused() -> None:
    with pytest.raises(TypeError, match="takes no object"):
        render("{{ x }}", CHATS["one"], values={"x": object()})
    with pytest.raises(ValueError, match="no message"):
        render("{{ x }}", [])


def test_a_message_that_a_template_writes_twice_cannot_go_on():
    said = [{"role": "assistant", "content": "THE-MESSAGE-GOES-ON-HERE x"}]
    once = "{{ messages[0].content }}"
    assert render(once, said, continue_final=True) == said[0]["content"]
    with pytest.raises(ValueError, match="changes the last message"):
        render(once + once, said, continue_final=True)
