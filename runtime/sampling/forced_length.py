"""Bounds how much text a grammar can force where it leaves no choice.

llguidance finds forced text in one call, to its end, and tokenises all of it: a megabyte stops the
engine for seconds. So a grammar that may force more than a little yields its tokens one by one.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import inf, prod
from typing import Any

MAX_FORCED_BYTES = 8192
"""Characters that may be forced at once: 10 ms for llguidance (measured)."""

_ANNOTATIONS = {"$defs", "definitions", "description", "title", "examples", "default", "$comment"}
_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_MINIMA = ("minItems", "minLength", "minProperties", "minContains")
_RULE = re.compile(r"[ \t]*[?!]?([A-Za-z_][\w-]*)(\[.*?\])?(\.-?\d+)?[ \t]*(::=|:)(.*)")
_NAMES = re.compile(r"[A-Za-z_][\w-]*")


@lru_cache(maxsize=256)
def forced_length(kind: str, text: str) -> float:
    """A bound on the characters that the grammar forces anywhere; infinity if none is known.

    It is the length of the whole grammar written out, each part as often as it must come. A
    recursive grammar has no bound, since the ends of its parts may follow each other in any number.

    Args:
        kind: as in `StructuredOutputsParams`.
    """
    try:
        match kind:
            case "choice":
                return max(map(len, json.loads(text)), default=0)
            case "json_object":
                return 16  # a brace, a colon
            case "json":
                schema = json.loads(text)
                return _schema_length(schema, schema, {})
            case "regex":
                return len(text) * _times(text)
        return _grammar_length(text)
    except (ValueError, RecursionError, OverflowError):
        return inf


def _times(text: str) -> float:
    """How often the parts of a pattern or a rule may be required, by the numbers in it."""
    return prod(max(1, min(int(number), 10**9)) for number in re.findall(r"[{~]\s*(\d+)", text))


def _schema_length(schema: Any, root: Any, known: dict[str, float]) -> float:
    """`known` are the schemas referred to; infinite while they are being bounded."""
    if isinstance(schema, list):
        return sum(_schema_length(one, root, known) for one in schema)
    if not isinstance(schema, dict):
        return len(json.dumps(schema)) + 4
    total, times = 4.0, 1.0
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        total += len(key) + 4
        if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
            total += _reference_length(value, root, known)
        elif key in ("anyOf", "oneOf") and isinstance(value, list):
            total += max((_schema_length(one, root, known) for one in value), default=0)
        elif key in _BY_NAME and isinstance(value, dict):
            total += sum(
                len(name) + 8 + _schema_length(one, root, known) for name, one in value.items()
            )
        elif key == "const":
            total += len(json.dumps(value))
        elif key == "enum" and isinstance(value, list):
            total += max((len(json.dumps(one)) for one in value), default=0)
        elif key == "pattern" and isinstance(value, str):
            total += len(value) * _times(value)
        else:
            total += _schema_length(value, root, known)
        if key in _MINIMA and isinstance(value, int | float):
            times *= max(1, value)
        if key == "x-guidance" and max(map(len, _texts(value)), default=0) > 2:
            return inf  # separators may be of any length
    return total * times


def _texts(options: Any) -> list[str]:
    """The required characters: white space may always be left out."""
    values = options.items() if isinstance(options, dict) else ()
    return [text for key, text in values if isinstance(text, str) and key != "whitespace_pattern"]


def _reference_length(path: str, root: Any, known: dict[str, float]) -> float:
    if path not in known:
        known[path] = inf
        there = root
        for name in path.removeprefix("#").strip("/").split("/") if path != "#" else ():
            name = name.replace("~1", "/").replace("~0", "~")
            there = there.get(name) if isinstance(there, dict) else None
        if there is not None:
            known[path] = _schema_length(there, root, known)
    return known[path]


def _grammar_length(grammar: str) -> float:
    """The bound of a Lark or GBNF grammar that has one rule a line, or alternatives below it."""
    bodies: dict[str, str] = {}
    name = ""
    for line in grammar.splitlines():
        if rule := _RULE.fullmatch(line):
            name = rule[1]
            bodies[name] = bodies.get(name, "") + rule[5]
        elif line.lstrip().startswith("|") and name:
            bodies[name] += line
        elif line.strip() and not line.startswith(("%llguidance", "%ignore", "//")):
            return inf
    known: dict[str, float] = {}
    return max((_rule_length(name, bodies, known) for name in bodies), default=inf)


def _rule_length(name: str, bodies: dict[str, str], known: dict[str, float]) -> float:
    if name not in known:
        known[name] = inf  # while it is being bounded
        body, total = bodies[name], 0.0
        if "%json" in body:
            body, _, text = body.partition("%json")
            schema, end = json.JSONDecoder().raw_decode(text.lstrip())
            total, body = _schema_length(schema, schema, {}), body + text.lstrip()[end:]
        if "%" in body:  # a directive that is not known here
            return inf
        parts = body.split("|") if re.fullmatch(r"[\w\s|-]*", body) else [body]
        used = [[one for one in _NAMES.findall(part) if one in bodies] for part in parts]
        total += max(sum(_rule_length(one, bodies, known) for one in names) for names in used)
        known[name] = (total + len(body)) * _times(body)
    return known[name]
