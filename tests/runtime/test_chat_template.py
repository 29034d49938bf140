"""Chat templates render as transformers renders them, whose renderer is not imported to serve."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from radixcache.runtime.checkpoints import chat_template
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


_DOUBLED = "{%% set n = namespace(x=%s) %%}{%% for _ in range(99) %%}{%% set n.x = n.x %s n.x %%}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * ['a'] }}",
        "{{ 9 ** 100000000 }}",
        _DOUBLED % ("'ab'", "+") + "{% endfor %}",
        _DOUBLED % ("9", "*") + "{% endfor %}",
        _DOUBLED % ("'ab'", "~") + "{% endfor %}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a' | center(width=10 ** 9) }}",
        "{{ ['a'] | map('center', 10 ** 9) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d%d' % (10 ** 9, 1, -10 ** 9) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 3) }}",
        "{{ (['a' * 10 ** 6] * 10 ** 3) | map('trim') | join }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ messages | tojson(separators=('a' * 10 ** 7, 'b' * 10 ** 7)) }}",
        "{% set x %}{% for _ in range(999) %}{{ 'a' * 10 ** 6 }}{% endfor %}{% endset %}",
        "{% for _ in range(999) %}{{ ('a' * 10 ** 6) | length }}{% endfor %}",
    ],
)
def test_an_operator_makes_no_more_than_a_prompt_may_hold(template: str) -> None:
    with pytest.raises(SecurityError, match="more text, items or digits than is allowed"):
        render(template, CHATS["one"])


def test_a_prompt_of_a_million_tokens_is_no_more_than_is_allowed() -> None:
    said = [{"role": "user", "content": "<think>12</think> " * 220_000}] * 2
    rendered = render(
        "{% set n = namespace(x='') %}{% for m in messages %}"
        "{% set c = m.content.split('</think>') %}"
        "{% set n.x = n.x + m.role ~ ': ' + c | join('\n') ~ m.content.replace('<think>', '') %}"
        "{% endfor %}{{ n.x | trim }}{{ messages | tojson }}{{ '%s' % n.x }}",
        said,
    )
    assert len(rendered) > 20_000_000


@pytest.mark.parametrize("loop", ["range(99999)", "range(99999) | list if true"])
def test_a_template_ends_in_time(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.2)
    loops = [f"{{% for {name} in {loop} %}}" for name in "abc"]
    template = "".join(loops) + "{% endfor %}" * 3
    with pytest.raises(SecurityError, match=r"takes longer than 0\.2 seconds"):
        render(template, CHATS["one"])
