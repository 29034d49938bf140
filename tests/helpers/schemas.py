"""Random JSON schemas of bounded size, of the keywords that people use."""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Whose values take a few hundred characters at most."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "pattern", "const"]
    if depth:
        kinds += ["object", "object", "object", "array", "anyOf"]
        kinds += ["$ref"] * (depth == 2)  # at the root, where pointers begin
    kind = rng.choice(kinds)
    if kind == "object":
        names = [_word(rng) + str(i) for i in range(rng.randint(1, 4))]
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "$ref":
        name = rng.choice("ABC")
        own = random_schema(rng, 0)
        properties = {"one": {"$ref": f"#/$defs/{name}"}, "other": {"$ref": f"#/$defs/{name}"}}
        return {"type": "object", "properties": properties, "required": ["other"],
                "additionalProperties": False, "$defs": {name: own}}  # fmt: skip
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", "^(x|yy)-[0-9]{3}$"])}
    if kind == "enum":
        values = [_word(rng), rng.randint(-9, 9), None, True, _word(rng)]
        return {"enum": rng.sample(values, rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([_word(rng), 7, False])}
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 99)}
    return {"type": kind}


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_lowercase + 'é"\\ ') for _ in range(rng.randint(1, 6)))
