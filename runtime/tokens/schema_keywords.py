"""Says in keywords that llguidance knows what else zod and pydantic write into JSON schemas.

What says nothing of a text is dropped; what is a pattern or a list becomes one. What no grammar can
hold is dropped and named: an answer may break it. All else the library refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_BASE64 = r"^(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?$"
_KNOWN = "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()
FORMATS: dict[str, dict[str, str]] = {
    **{kind: {"format": kind} for kind in _KNOWN},
    **{f"uuid{n}": {"format": "uuid", "pattern": f"^.{{14}}{n}.{{4}}[89abAB]"} for n in "1345678"},
    "base64": {"pattern": _BASE64.format("A-Za-z0-9+/")},
    "base64url": {"pattern": _BASE64.format("A-Za-z0-9_-")},
    "emoji": {"pattern": r"^\p{Extended_Pictographic}+$"},
    **{kind: {} for kind in ("binary", "password", "path")},
}
"""What each format says in known keywords; of any other, the pattern beside it says all."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")


def below(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """A keyword's value, with the schemas in it changed; those of an `allOf` stay as they are."""
    if key in _NAMED and isinstance(value, dict):
        return {name: change(one) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [change(one) for one in value]
    return change(value) if key in _SINGLE else value


def in_known_keywords(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """The schema in known keywords, and the names of what an answer may break. O(its size)."""
    left: list[str] = []

    def change(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        node = {key: below(key, value, change) for key, value in node.items()}
        if "format" in node:
            says = FORMATS.get(str(node.pop("format")))
            if says and re.search(r"\(\?<?[=!]", str(node.get("pattern"))):
                del node["pattern"]  # no grammar can look around; the format says most of it
                left.append("pattern")
            left.extend(["format"] * (says is None and "pattern" not in node))
            node = {**(says or {}), **node}
        left.extend(key for key in ("uniqueItems", "contentSchema") if node.pop(key, False))
        names = node.pop("propertyNames", True)
        left.extend(["propertyNames"] * (not _name_properties(node, names, schema)))
        return node

    return change(schema), tuple(dict.fromkeys(left))


def _name_properties(node: dict[str, Any], names: Any, root: Any) -> bool:
    """Put `propertyNames` into other keywords of `node`; returns whether these say all of it."""
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        _, kind, name = names["$ref"].split("/")
        names = root[kind][name]
    if not isinstance(names, dict):
        return names is True
    says = {k: v for k, v in names.items() if k not in ("type", "title", "description")}
    if not says or not node.keys().isdisjoint(("properties", "patternProperties")):
        return not says
    value = node.get("additionalProperties", True)
    if (known := _listed(says)) is not None:
        found = {name: value for name in known if isinstance(name, str)}
        node |= {"properties": found, "additionalProperties": False}
        return len(says) == 1
    pattern = says.pop("pattern", None)
    if pattern is None and says.keys() & {"minLength", "maxLength"}:
        pattern = rf"^[\s\S]{{{says.pop('minLength', 0)},{says.pop('maxLength', '')}}}$"
    if pattern is not None:
        node |= {"patternProperties": {str(pattern): value}, "additionalProperties": False}
    return not says


def _listed(schema: Any) -> list[Any] | None:
    """The values that a schema lists, if it does."""
    match schema:
        case {"const": value}:
            return [value]
        case {"enum": [*values]}:
            return values
        case {"anyOf": [*parts]} if None not in (found := [_listed(part) for part in parts]):
            return [value for values in found for value in values or ()]
    return None
