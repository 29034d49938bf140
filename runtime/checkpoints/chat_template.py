"""Renders chat templates, which come from strangers, in a sandbox.

What a template finds there is what transformers would give it, whose own renderer takes half a
second to import: its filters and functions, the names of special tokens, and plain values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates call a message's thoughts; the first is the usual name, gpt-oss has the second."""

_HERE = "THE-MESSAGE-GOES-ON-HERE "
"""Its space shows whether a template keeps those at the end of a text."""


class _Generation(Extension):
    """Marks that a training script reads around an answer: their content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - of the class, as jinja wants it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` without the methods that a template could leave the sandbox by."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Names(Namespace):
    """jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *values = args
        Namespace.__init__(self)
        for name, value in dict(*values, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a template cannot set {name!r}")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that is not escaped for HTML; `json`'s options that call a function are not given."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().strftime(format)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Names,
    }
    return environment.from_string(template)


def _plain(value: Any) -> Any:
    """A copy of what JSON can say, without the methods of any other class."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    raise TypeError(f"a chat template takes no {type(value).__name__}")


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is None, and with thoughts under each name that templates read."""
    message: dict[str, Any] = _plain({k: v for k, v in given.items() if v is not None})
    thoughts = next((message[name] for name in _THOUGHTS if name in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return message


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    ask: bool = False,
    continue_final: bool = False,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text of a conversation.

    Args:
        tools: functions in OpenAI's format; None if the template is not told of tools.
        ask: the template's `add_generation_prompt`.
        continue_final: end within the last message.
        values: by name, such as `bos_token`.

    Raises:
        ValueError: there is no message, or the last one cannot go on.
        Exception: whatever the template raises.
    """
    if not messages:
        raise ValueError("there is no message")
    chat, said = [_message(message) for message in messages], ""
    if continue_final:
        content = chat[-1].get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part for part in parts if isinstance(part, dict) and "text" in part]
        if not texts or not isinstance(said := texts[-1]["text"], str):
            raise ValueError("the last message has no text that could go on")
        texts[-1]["text"] = said + _HERE
        if content is not parts:
            chat[-1]["content"] = said + _HERE
    given = {"messages": chat, "tools": _plain(tools), "documents": None}
    text = _compiled(template).render(add_generation_prompt=ask, **given, **_plain(values))
    if continue_final:
        mark = _HERE.strip()
        at, once = text.rfind(mark), text.count(mark) == said.count(mark) + 1
        if not once or said.strip() not in text:  # twice: the first mark would stay in the text
            raise ValueError("the template changes the last message, which so cannot go on")
        kept = text.startswith(_HERE, at)
        text = text[:at] if kept else text[:at].rstrip()
    return text
