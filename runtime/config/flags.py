"""Declares a setting once, as a field of a dataclass, from which its command-line flag, environment
variable and name in a settings file are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from radixcache.errors import InvalidRequest


class Rule(NamedTuple):
    """A rule for a value, or for each item of a list."""

    holds: Callable[[Any], bool]
    reason: str
    """Follows the setting's name: "must be at least 1"."""

    def check(self, value: Any) -> None:
        """Raise `ValueError` with the reason if the rule does not hold; None is always allowed."""
        each = value if isinstance(value, list | tuple) else [value]
        if value is not None and not all(map(self.holds, each)):
            raise ValueError(self.reason)


def at_least(bound: float) -> Rule:
    """A rule that a number is no less than `bound`."""
    return Rule(lambda value: value >= bound, f"must be at least {bound:g}")


def setting(
    default: Any,
    text: str,
    *,
    metavar: str | None = None,
    rule: Rule | None = None,
    parse: Callable[[Any], Any] | None = None,
    flag: bool = True,
) -> Any:
    """A field of a dataclass.

    Args:
        text: the help of its flag. The default follows in parentheses, unless it ends with some.
        metavar: how its flag shows the value.
        rule: a condition on the value besides its type.
        parse: converts the value of a flag, a variable or a file.
        flag: whether users can set it.
    """
    metadata = {"help": text, "metavar": metavar, "rule": rule, "parse": parse, "flag": flag}
    return field(default=default, metadata=metadata)


class Setting(NamedTuple):
    """A declared setting: see `setting`."""

    name: str
    type: Any
    """Without None."""
    default: Any
    help: str
    metavar: str | None
    rule: Rule | None
    parse: Callable[[Any], Any] | None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values, if they are listed."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def settings_of(kind: type) -> Iterator[Setting]:
    """The settings that a dataclass declares, in order."""
    types = get_type_hints(kind)
    for one in fields(kind):
        metadata = dict(one.metadata)
        if metadata.pop("flag", False):
            yield Setting(one.name, _without_none(types[one.name]), one.default, **metadata)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return Union[tuple(one for one in get_args(kind) if one is not NoneType)]  # noqa: UP007


def check(args: Any) -> None:
    """Refuse values that are not among the choices, not numbers where required, or break a rule.

    Raises:
        InvalidRequest: with the setting's name and what it must be.
    """
    for one in settings_of(type(args)):
        value = getattr(args, one.name)
        if value is None and one.default is None:
            continue
        if one.choices or one.type is bool:
            choices = one.choices or (True, False)
            if value not in choices:
                listed = ", ".join(map(str, choices))
                raise InvalidRequest(f"{one.name} must be one of {listed}, not {value!r}")
        elif one.rule is not None:
            try:
                one.rule.check(value)
            except (TypeError, ValueError):
                raise InvalidRequest(f"{one.name} {one.rule.reason}, not {value!r}") from None


def add_flags(
    parser: argparse._ActionsContainer, kind: type, leave_out: tuple[str, ...] = ()
) -> None:
    """Add a flag for each setting; an absent flag is None, so that the default holds."""
    for one in settings_of(kind):
        if one.name in leave_out:
            continue
        options: dict[str, Any] = {"metavar": one.metavar, "default": None}
        if one.type is bool:
            options = {"action": "store_true", "default": None}
        elif one.choices:
            options = {"choices": one.choices, "default": None}
        elif get_origin(one.type) is Sequence:
            options["nargs"] = "+"
        elif one.type in (int, float, Path):
            options["type"] = one.type
        parser.add_argument(f"--{one.name.replace('_', '-')}", help=_help(one), **options)


def _help(one: Setting) -> str:
    plain = isinstance(one.default, int | float | str) and not isinstance(one.default, bool)
    if not plain or one.help.endswith(")"):
        return one.help
    shown = f"{one.default:g}" if isinstance(one.default, float) else one.default
    return f"{one.help} ({shown})"
