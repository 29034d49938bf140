"""What zod and pydantic write into schemas holds, or is named."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from itertools import product
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from pydantic import Field, TypeAdapter

from radixcache.runtime.sampling.grammar_compiler import Vocabulary, compile_grammar
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams

TOKENS = [*(bytes([i]) for i in range(256)), b"<end>"]
LLGUIDANCE = Vocabulary(TOKENS, [256], [256], {}, lambda text: [*text.encode()]).read()
JSON = StructuredOutputsParams.json
Colour = enum.Enum("Colour", {"RED": "red", "BLUE": "blue"})


def says(schema: Any, rng: random.Random) -> str:
    """A text that the grammar of a schema lets through, of random bytes."""
    matcher, text = compile_grammar("json", JSON(schema).value, LLGUIDANCE, {}), b""
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:257]).tolist()
        token = 256 if 256 in allowed else rng.choice([*({*allowed} & {*b'"}]'}), *allowed])
        assert matcher.consume_token(token)
        text += TOKENS[token] if token < 256 else b""
    return text.decode()


PYDANTIC: dict[str, list[Any]] = {
    "": [pydantic.UUID1, pydantic.UUID4, pydantic.UUID7, pydantic.Base64Bytes, bytes,
         pydantic.Base64UrlBytes, pydantic.SecretStr, pathlib.PurePath, dict[Colour, int],
         dict[Literal["a", "b"], int], dict[pathlib.PurePath, int],
         dict[Annotated[str, Field(min_length=2, max_length=3)], int],
         dict[Annotated[str, Field(pattern="^k[0-9]$")], int]],
    "propertyNames": [dict[uuid.UUID, int], dict[datetime.date, int],
                      dict[Annotated[str, Field(max_length=4, pattern="^a")], int]],
    "uniqueItems": [set[int], list[frozenset[Colour]]],
    "format": [re.Pattern[str], pydantic.FilePath, ipaddress.IPv4Network, pydantic.PostgresDsn],
    "contentSchema": [pydantic.Json[list[int]]],
}  # fmt: skip


@pytest.mark.parametrize("left", PYDANTIC)
def test_what_pydantic_writes_holds_or_is_named(left: str) -> None:
    for kind in PYDANTIC[left]:
        for adapter in (TypeAdapter(kind), TypeAdapter(pydantic.create_model("M", x=(kind, ...)))):
            schema, rng = adapter.json_schema(), random.Random(7)
            assert ", ".join(JSON(schema).left_open) == left
            for text in [says(schema, rng) for _ in range(5)] * (not left):
                adapter.validate_json(text)
                jsonschema.validate(json.loads(text), schema)
    broken: list[Any] = [5, None, [], {}, "x", [[]], {"$ref": 5}, {"$ref": "#/a/b"}, {"anyOf": 5}]
    for key, value in product(("format", "pattern", "anyOf", "enum", "minLength"), broken):
        JSON({key: value, "a": [5], "propertyNames": {key: value}})  # it is left to the library


TEXT, NUMBERS = {"type": "string"}, {"type": "object", "additionalProperties": {"type": "integer"}}
ZOD: list[tuple[dict[str, Any], Any, Any]] = [
    ({**TEXT, "format": "nanoid", "pattern": "^[a-z]{3}$"}, "abc", "ab"),
    ({**TEXT, "format": "base64", "contentEncoding": "base64"}, "aGk=", "aGk"),
    ({**TEXT, "format": "emoji", "pattern": r"^(?=.)\p{Emoji}+$"}, "🙂", "1"),
    ({**TEXT, "format": "hostname", "pattern": "^(?=.{1,9}$)a"}, "a.de", "a b"),
    ({**TEXT, "format": "uuid", "pattern": "^7"}, f"{uuid.UUID(int=7 << 124)}", "7"),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, 1.5, "a"),
    ({**NUMBERS, "propertyNames": TEXT}, {"any": 1}, {"any": "x"}),
    ({**NUMBERS, "propertyNames": {"enum": ["a", "b"]}, "required": ["a"]}, {"a": 1}, {"b": 1}),
    ({**NUMBERS, "propertyNames": {"anyOf": [{"const": "a"}, {"const": "b"}]}}, {"b": 1}, {"c": 1}),
    ({**NUMBERS, "propertyNames": {**TEXT, "pattern": "^k"}}, {"k1": 1}, {"a": 1}),
    ({"type": "array", "items": TEXT, "uniqueItems": False}, ["a", "a"], [1]),
]


@pytest.mark.parametrize(("schema", "valid", "other"), ZOD, ids=range(len(ZOD)))
def test_what_zod_writes_holds(schema: dict[str, Any], valid: Any, other: Any) -> None:
    for value in (valid, other):
        matcher = compile_grammar("json", JSON(schema).value, LLGUIDANCE, {})
        text = [*json.dumps(value, ensure_ascii=False).encode()]
        taken = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        left = ("pattern",) * ("(?=" in str(schema))
        assert taken == (value is valid) and JSON(schema).left_open == left
