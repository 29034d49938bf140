"""Bounds what a JSON schema leaves open, so that a model cannot go on for ever.

A small sampled model may write digits, decimals or keys until its answer is cut off. OpenAI's
strict schemas must close their objects; here that is the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from radixcache.runtime.tokens.schema_keywords import below, in_known_keywords

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_INTEGER = 10**16 - 1
"""Bound of an integer that has none: 16 digits, which doubles can tell apart."""

MAX_NUMBER = 10**15
SMALLEST_STEP = 1e-9
"""The step of a number without bounds and `multipleOf`: nine decimals, and no exponent."""

SPACES: JsonCompileOptions = {"whitespace_pattern": r" |\n[ \t]{0,16}"}
"""The white space that llguidance allows once between JSON's tokens; more would have no end."""

ANY_OBJECT = {
    "type": "object",
    "additionalProperties": {"$ref": "#/$defs/value"},
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["null", "boolean", "string"]},
                {
                    "type": "number",
                    "minimum": -MAX_NUMBER,
                    "maximum": MAX_NUMBER,
                    "multipleOf": SMALLEST_STEP,
                },
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}},
            ]
        }
    },
}
"""The schema of the format "json_object": any object, its numbers bounded."""

_ANNOTATIONS = {"$comment", "default", "description", "examples", "title"}
_COMPOSING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")


def complete(schema: Any) -> Any:
    """The schema in known keywords, with bounds for numbers that have none, closed objects, and no
    annotations. O(its size).

    The schema's own bounds, `multipleOf` and `additionalProperties` stay. Objects that list
    `properties`, or patterns alone, are closed, unless the schema composes an object from several
    schemas, each of which would then forbid the others' properties. The parts of an `allOf` stay
    as they are.
    """
    schema, _ = in_known_keywords(schema)
    closes = not any(_is_composed(node) for node in _nodes(schema))
    return _complete(schema, closes)


def _complete(schema: Any, closes: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    said = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    change = partial(_complete, closes=closes)
    found = {key: below(key, value, change) for key, value in said.items()}
    kinds = found.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "enum" in found or "const" in found or "allOf" in found:
        return found
    if "integer" in kinds and "number" not in kinds:
        _bound(found, MAX_INTEGER)
    elif "number" in kinds:
        _bound(found, MAX_NUMBER)
        found.setdefault("multipleOf", SMALLEST_STEP)
    if closes and "patternProperties" in found and "properties" not in found:
        found.setdefault("additionalProperties", False)
    closes = closes and {"patternProperties", "unevaluatedProperties"}.isdisjoint(found)
    named, required = found.get("properties"), found.get("required")
    required = required if isinstance(required, list) else []
    if (
        closes
        and isinstance(named, dict)
        and all(isinstance(name, str) and name in named for name in required)
    ):
        found.setdefault("additionalProperties", False)
    return found


def _bound(schema: dict[str, Any], most: int) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    low = schema.get("exclusiveMinimum") if low is None else low
    high = schema.get("exclusiveMaximum") if high is None else high
    low = None if isinstance(low, float) and low < -1e18 else low  # such as that of float64
    high = None if isinstance(high, float) and high > 1e18 else high
    if low is None and (high is None or _is_number(high)):
        schema["minimum"] = -most if high is None else min(-most, 10 * -abs(high))
    if high is None and (low is None or _is_number(low)):
        schema["maximum"] = most if low is None else max(most, 10 * abs(low))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _is_composed(schema: dict[str, Any]) -> bool:
    if "allOf" in schema:
        return True
    return any(key in schema for key in _COMPOSING) and any(key in schema for key in _OF_OBJECTS)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas within a schema, and the schema itself."""
    rest = [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            yield node
            for key, value in node.items():
                below(key, value, rest.append)
