"""Reads tagged arguments. Tags do not tell text from JSON, so an argument's schema must.

Text stays text wherever the schema allows a string: `12345` for `string | null`, for example, and
JSON that is to be written to a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from radixcache.runtime.tokens.tool_calls import read_json

_KEPT = ("type", "enum", "const", "nullable")
"""Keywords that hold for all alternatives of a schema."""
_KINDS = {
    str: {"string"}, bool: {"boolean"}, type(None): {"null"}, int: {"integer", "number"},
    float: {"integer", "number"}, list: {"array"}, dict: {"object"},
}  # fmt: skip


class Alternative(NamedTuple):
    """One of the schemas that a value may follow.

    Attributes:
        values: the values of its `enum` or `const`, if it has one.
        kinds: else its types; a schema without a type is a string's.
    """

    schema: Mapping[str, Any]
    values: list[Any]
    kinds: set[str]


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Alternative]:
    """The alternatives of a schema in `root`, at least one. O(size of `root`)."""
    return _find(schema, root, set()) or [_alternative({})]


def _find(schema: Any, root: Mapping[str, Any], known: set[str]) -> list[Alternative]:
    found, rest = list[Alternative](), [schema]
    while rest:
        node = rest.pop()
        if not isinstance(node, Mapping):
            continue
        if node.get("nullable") is True:
            found.append(Alternative({"type": "null"}, [], {"null"}))
        parts = node.get("allOf", node.get("anyOf", node.get("oneOf")))
        if isinstance(parts, list) and (parts := [p for p in parts if isinstance(p, Mapping)]):
            kept = {name: node[name] for name in _KEPT if name in node}
            if "allOf" not in node:
                rest += [{**kept, **part} for part in reversed(parts)]
                continue
            merged = {key: value for part in [kept, *parts] for key, value in part.items()}
            inner = _find(merged, root, known)
            kinds = {kind for one in inner for kind in one.kinds}
            is_text = "string" in kinds or any(one.values for one in inner)
            found += inner if is_text or not kinds else [Alternative(node, [], kinds)]
        elif "$ref" not in node:
            found.append(_alternative(node))
        elif (path := str(node["$ref"])) not in known:  # each is followed once
            known.add(path)
            rest.append(_resolve(path, root))
    return found


def _alternative(schema: Mapping[str, Any]) -> Alternative:
    kinds = schema.get("type")
    if kinds is None and {"properties", "additionalProperties"} & schema.keys():
        kinds = "object"
    elif kinds is None and {"items", "prefixItems"} & schema.keys():
        kinds = "array"
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    names = {one for one in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(one, str)}
    if not isinstance(listed, list):
        return Alternative(schema, [], {"string"} if kinds is None else names)
    return Alternative(
        schema, [v for v in listed if not names or _KINDS.get(type(v), names) & names], set()
    )


def _resolve(path: str, root: Mapping[str, Any]) -> Any:
    there: Any = root if path.startswith("#/") else None
    for key in path.removeprefix("#/").split("/"):
        key = key.replace("~1", "/").replace("~0", "~")
        there = there.get(key) if isinstance(there, Mapping) else None
    return there


def read_argument(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of an argument with this schema."""
    found = alternatives(schema, root)
    kinds = {kind for one in found for kind in one.kinds}
    values = [value for one in found for value in one.values]
    nullable = "null" in kinds or None in values
    if text in [value for value in values if isinstance(value, str)]:
        return text
    if nullable and text == "null":
        return None
    others = kinds - {"string", "null"} or [v for v in values if not isinstance(v, str | None)]
    if "string" in kinds or not (others or kinds == {"null"}):
        return text
    if text in ("True", "False") and ("boolean" in kinds or bool(text == "True") in values):
        return text == "True"
    if nullable and text == "None":
        return None
    return read_or_text(text)


def read_or_text(text: str) -> Any:
    """The value of a JSON text; the text itself if it is no JSON."""
    try:
        return read_json(text)
    except ValueError:
        return text
