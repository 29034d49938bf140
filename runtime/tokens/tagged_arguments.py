"""What the text of a tagged argument is: tags tell no text from JSON, so its schema has to.

Text stays text wherever a string may be meant, whatever it looks like: `12345` is one for
`string | null`, and so is JSON that a file is to hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from radixcache.runtime.tokens.tool_calls import MAX_DEPTH, read_json

_KEPT = ("type", "enum", "const", "nullable")
"""What a schema says of all of its alternatives."""
_KINDS = {
    str: {"string"}, bool: {"boolean"}, type(None): {"null"}, int: {"integer", "number"},
    float: {"integer", "number"}, list: {"array"}, dict: {"object"},
}  # fmt: skip


class Alternative:
    """One of the schemas that a value may follow.

    Attributes:
        values: those of its list, if it has one.
        kinds: else its types; text is what says nothing of its type.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        kinds = schema.get("type")
        if kinds is None and {"properties", "additionalProperties"} & schema.keys():
            kinds = "object"
        elif kinds is None and {"items", "prefixItems"} & schema.keys():
            kinds = "array"
        kinds = kinds if isinstance(kinds, list) else ["string" if kinds is None else kinds]
        self.schema = schema
        self.values: list[Any] = []
        self.kinds: set[str] = set()
        if not isinstance(listed, list):
            self.kinds = {kind for kind in kinds if isinstance(kind, str)}
        else:
            self.values = [
                v for v in listed if "type" not in schema or _KINDS.get(type(v), set()) & {*kinds}
            ]


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Alternative]:
    """Of a schema in `root`, references followed; at least one."""
    return [Alternative(leaf) for leaf in _leaves(schema, root, 0)] or [Alternative({})]


def _leaves(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH // 10:
        return
    if schema.get("nullable") is True:
        yield {"type": "null"}
    for key in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            kept = {name: schema[name] for name in _KEPT if name in schema}
            if key == "allOf":
                parts = [{k: v for p in parts if isinstance(p, Mapping) for k, v in p.items()}]
            for part in parts:
                if isinstance(part, Mapping):
                    yield from _leaves({**kept, **part}, root, depth + 1)
            return
    if "$ref" not in schema:
        yield schema
        return
    _, _, path = str(schema["$ref"]).partition("#/")
    there: Any = root if path else {}
    for key in path.split("/") if path else ():
        key = key.replace("~1", "/").replace("~0", "~")
        there = there.get(key) if isinstance(there, Mapping) else None
    yield from _leaves(there, root, depth + 1)


def read_argument(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that an argument of this schema has."""
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
    """What a text says as JSON; itself, if it is none."""
    try:
        return read_json(text)
    except ValueError:
        return text
