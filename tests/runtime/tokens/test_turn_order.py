"""Conversations are put in an order that the template takes, and no text is lost or told twice."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.runtime.tokens.turn_order import RoleOrder
from tests.helpers.scripted import call, make_tokenizer

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>\n"
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
FIRST = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
DROPS = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
HOISTS = (  # as DeepSeek's: all that the system says comes first
    "{% if loop.first %}{% for s in messages[1:] if s.role == 'system' %}{{ s.content }}"
    "{% endfor %}{% endif %}"
)
IN_TURN = (  # as Mistral's: results of tools are not counted, nor their calls
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turns.n % 2 == 0) %}{{ raise_exception('in turn!') }}{% endif %}"
    "{% set turns.n = turns.n + 1 %}{% endif %}"
)


def tokenizer_of(*rules: str) -> Tokenizer:
    plain = make_tokenizer()
    plain.chat_template = (
        "{% set turns = namespace(n=0) %}{% for m in messages %}"
        + f"{''.join(rules)}{TURN}"
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Tokenizer(plain)


TEMPLATES = {
    "any order": ((), RoleOrder()),
    "the system first": ((FIRST,), RoleOrder(late_system=False)),
    "others are left out": ((DROPS,), RoleOrder(late_system=False)),
    "all at the top": ((HOISTS, DROPS), RoleOrder(late_system=False)),
    "no system": ((NO_SYSTEM, IN_TURN), RoleOrder(False, False, False, False)),
    "in turn": ((FIRST, IN_TURN), RoleOrder(True, False, False, False)),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_is_found_by_trying(name: str) -> None:
    rules, wanted = TEMPLATES[name]
    assert tokenizer_of(*rules)._order == wanted


def conversation(roles: str) -> list[dict[str, Any]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}
    messages: list[dict[str, Any]] = []
    for place, role in enumerate(roles):
        messages.append({"role": names[role], "content": f"Text {place}."})
        if role == "c":
            function = {"name": "f", "arguments": {"place": place}}
            messages[-1]["tool_calls"] = [{"id": f"c{place}", "function": function}]
        if role == "t":
            messages[-1]["tool_call_id"] = f"c{place - 1}"
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_order_is_rendered_and_goes_on_from_what_was_rendered_before(name: str) -> None:
    tokenizer, rng = tokenizer_of(*TEMPLATES[name][0]), random.Random(7)
    starts = ["", "s", "ss", "u", "su"]
    turns = ["u", "uu", "su", "us", "usu", "suu"]
    ends = ["a", "ct", "ctct"]
    for _ in range(60):
        roles, before = rng.choice(starts), ""
        for _ in range(4):
            roles += rng.choice(turns)
            messages = conversation(roles)
            text = tokenizer.render_chat(messages)
            assert text.startswith(before), roles
            places = [text.find(message["content"]) for message in messages]
            assert min(places) >= 0 and places == sorted(places), roles
            end = rng.choice(ends) + "a"
            roles += end.removesuffix("a") if end != "aa" else "a"
            told = tokenizer.render_chat(conversation(roles), ask=False)
            assert told.startswith(text), roles
            before = told.removesuffix("<|im_end|>\n")


def test_conversations_in_order_are_left_as_they_are() -> None:
    order = RoleOrder(True, False, False, False)
    for roles in ("su", "suau", "uctctau", "sucta", "ucau", "uaccu"):
        assert order.arrange(conversation(roles)) == conversation(roles)
    strict = RoleOrder(False, False, False, False)
    joined = strict.arrange(conversation("suaasuuctus"))
    assert [(one["role"], one["content"]) for one in joined] == [
        ("user", "Text 0.\n\nText 1."),
        ("assistant", "Text 2.\n\nText 3."),
        ("user", "Text 4.\n\nText 5.\n\nText 6."),
        ("assistant", "Text 7."),
        ("tool", "Text 8.\n\nText 9.\n\nText 10."),
    ]


@pytest.mark.parametrize("rules", [rules for rules, _ in TEMPLATES.values()])
def test_generic_tools_go_with_every_order(rules: tuple[str, ...]) -> None:
    plain = tokenizer_of(*rules)._tokenizer
    plain.chat_template = plain.chat_template.replace("tool_calls", "nothing")
    tokenizer = Tokenizer(plain)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for start, end in product(["u", "su", "uu", "ssu"], ["ctu", "ctsu", "ctuu", "ct"]):
        text = tokenizer.render_chat(conversation(start + end), tools=[tool])
        assert text.index("You may call functions") < text.index(call("f", place=len(start)))
        assert text.count("<tool_response>\nText") == 1
