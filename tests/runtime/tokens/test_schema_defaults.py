"""What a schema leaves open is bounded or closed; what it says itself stands."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from radixcache.runtime.tokens.schema_defaults import MAX_INTEGER, MAX_NUMBER, complete
from tests.helpers.schemas import random_schema

INTEGER = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
NUMBER = {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER, "multipleOf": 1e-9}
A = {"a": {"type": "string"}}
CLOSED = {"properties": A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "completed"),
    [
        ({"type": "integer"}, INTEGER),
        ({"type": ["null", "integer"]}, {**INTEGER, "type": ["null", "integer"]}),
        ({"type": "integer", "minimum": 3}, {**INTEGER, "minimum": 3}),
        (
            {"type": "integer", "exclusiveMaximum": 10**17},
            {"type": "integer", "exclusiveMaximum": 10**17, "minimum": -(10**18)},
        ),
        ({"type": "number"}, NUMBER),
        ({"type": "number", "multipleOf": 0.5}, {**NUMBER, "multipleOf": 0.5}),
        ({"properties": A}, CLOSED),
        ({"items": {"properties": A}}, {"items": CLOSED}),
        # Properties of the names of keywords.
        ({"properties": {"type": {"type": "integer"}, "properties": A["a"]}},
         {**CLOSED, "properties": {"type": INTEGER, "properties": A["a"]}}),
        ({"$defs": {"x": {"properties": A}}, "$ref": "#/$defs/x"},
         {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"anyOf": [{"properties": A}, {"type": "integer"}]}, {"anyOf": [CLOSED, INTEGER]}),
    ],
)  # fmt: skip
def test_what_is_open_is_closed(schema: Any, completed: Any) -> None:
    assert complete(schema) == completed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "enum": [10**20]},
        {"type": "integer", "minimum": 1, "maximum": 10**18},
        {"properties": A, "additionalProperties": True},
        {"properties": A, "additionalProperties": {"type": "string"}},
        {"properties": A, "patternProperties": {"^b": {"type": "string"}}},
        {"properties": A, "unevaluatedProperties": False},
        {"type": "object"},
        {"allOf": [{"properties": A}, {"properties": {"b": {"type": "string"}}}]},
        {"properties": A, "anyOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
        {"properties": A, "required": ["b"]},
        {"properties": A, "required": [["a"]]},
        {"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 10**18}]},
        {"properties": A, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}},
        {"const": {"properties": A}},
        {"enum": [{"type": "integer"}]},
        True,
        "no schema",
    ],
)
def test_what_a_schema_says_itself_stands(schema: Any) -> None:
    assert complete(schema) == schema


def test_what_is_of_the_completed_schema_is_of_the_schema() -> None:
    choose, valid = random.Random(20261124), 0
    values = [0, -7, 2.5, 10**20, "abc", None, True, [], [1, 2], {}, {"a": "b"}, {"a": 1, "z": 2}]
    for _ in range(500):
        schema = random_schema(choose)
        loose, strict = jsonschema.Draft202012Validator, complete(schema)
        for value in values:
            if loose(strict).is_valid(value):
                valid += 1
                assert loose(schema).is_valid(value)
    assert valid > 100
