"""Renders chat templates, which come from strangers, in a sandbox.

What a template finds there is what transformers would give it, whose own renderer takes half a
second to import: its filters and functions, the names of special tokens, and plain values only.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from math import prod
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What templates call a message's thoughts; the first is the usual name, gpt-oss has the second."""

_HERE = "THE-MESSAGE-GOES-ON-HERE "
"""Its space shows whether a template keeps those at the end of a text."""


MOST_SECONDS, MOST_SIZE, MOST_IN_ALL = 10.0, 1 << 25, 1 << 29
"""Bounds of one rendering: its time, and what one operator, filter or method makes, and all do, in
characters, items or bits of a number. A prompt of a million tokens takes a fraction of each."""

_left: ContextVar[list[float]] = ContextVar("left")
"""Of the rendering: the time of its end, and what may still be made."""

_NO_LARGER = frozenset(
    """split rsplit splitlines partition rpartition strip lstrip rstrip trim startswith endswith
    find rfind index rindex count removeprefix removesuffix get items keys values default d length
    list first last select reject selectattr rejectattr map truncate int isdigit string""".split()
)
"""Methods and filters that make no more than they are given, or one item after the other."""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox with bounds for loops, operators, filters and methods."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        _make(sum(map(len, parts := [*parts])))
        return "".join(parts)

    def _parse(self, *source: Any) -> jinja2.nodes.Template:
        tree = super()._parse(*source)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "in_time", [], [], None, None)
        for joined in tree.find_all(jinja2.nodes.Concat):
            parts = jinja2.nodes.List(joined.nodes)
            joined.nodes = [jinja2.nodes.Filter(parts, "join", [], [], None, None)]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _make(_growth(operator, left, [right]))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps those that format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int | list | dict):
            _make(_growth(method.__name__, owner, [*args, *named.values()]))
        return super().call(__context, __obj, *args, **named)


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes no more than is allowed."""

    @wraps(made)  # and what jinja passes before the value
    def bounded(*args: Any, **named: Any) -> Any:
        args = tuple([*arg] if isinstance(arg, Iterator) else arg for arg in args)
        value, *more = args[hasattr(made, "jinja_pass_arg") :]
        _make(_growth(name, value, [*more, *named.values()]))
        return made(*args, **named)

    return bounded


def _growth(name: str, value: Any, args: list[Any]) -> int:
    """About what an operator, method or filter makes of a value: the product of all, at most."""
    if name in _NO_LARGER:
        return 0
    if name == "**" and isinstance(args[0], int):
        return _size(value) * args[0]
    if name == "+" or (name in "*%" and isinstance(value, int) and isinstance(args[0], int)):
        return _size(value) + _size(args[0])
    if name == "replace":
        value, args = str(value).count(str(args[0])), args[1:2]
    elif isinstance(value, str) and name in ("%", "format", "format_map"):
        widths = map(int, re.findall(r"\d{1,20}", value))
        value = sum(widths) + value.count("%") + value.count("{")
    return prod(max(1, _weight(each)) for each in (value, *args))


def _size(value: Any) -> int:
    """Characters, items, or the bits of a number eight times, since products take long."""
    if isinstance(value, int):
        return 8 * value.bit_length()
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _weight(value: Any) -> int:
    """A number, or the characters and numbers of all that is inside, as far as is allowed."""
    weight, rest = 0, [value]
    while rest and weight <= MOST_SIZE:
        each = rest.pop()
        if isinstance(each, list | tuple | dict):
            rest += each.values() if isinstance(each, dict) else each
        weight += abs(each) if isinstance(each, int) else _size(each)
    return weight


def _make(size: float) -> None:
    """Raises where a rendering takes too long, or is about to make too much."""
    left = _left.get()
    left[1] -= size
    if size > MOST_SIZE or left[1] < 0:
        raise SecurityError("a template makes more text, items or digits than is allowed")
    if time.monotonic() > left[0]:
        raise SecurityError(f"a template takes longer than {MOST_SECONDS:g} seconds")


def _in_time(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, until the time is over."""
    for item in items:
        _make(0)
        yield item


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
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    named = {**environment.filters, "tojson": _to_json}
    bounded = {name: _bounded(name, each) for name, each in named.items()}
    environment.filters = {**bounded, "in_time": _in_time}
    del environment.globals["lipsum"]
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
    _left.set([time.monotonic() + MOST_SECONDS, MOST_IN_ALL])
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
