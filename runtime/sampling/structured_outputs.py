"""The form that a request asks for in its answer; importable without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from radixcache.errors import InvalidRequest
from radixcache.runtime.tokens.schema_keywords import in_known_keywords
from radixcache.runtime.tokens.tool_calls import is_longer, read_object

Kind = Literal["json_object", "json", "regex", "choice", "grammar"]


MAX_TEXT = 1 << 16
"""Characters of a schema."""

MAX_GRAMMAR = 4 * MAX_TEXT
"""Characters of a grammar, which may contain the schemas of many tools."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Restricts every token of the answer to those that can still lead to this form.

    Attributes:
        kind: the kind of `value`.
        value: for "json" a JSON schema as text; for "choice" a JSON list of strings; for "grammar"
            llguidance's Lark, or GBNF.
        after: the form begins behind this text, such as `</think>`; None is at once.
        left_open: keywords of the schema that no grammar can hold: the answer may break them.
    """

    kind: Kind
    value: str = ""
    after: str | None = None
    left_open: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise InvalidRequest(f"the kind of a structure must be one of {kinds}: {self.kind!r}")
        if not isinstance(self.value, str):
            raise InvalidRequest(f"{self.kind}: text is wanted, not {type(self.value).__name__}")
        most = MAX_GRAMMAR if self.kind == "grammar" else MAX_TEXT
        if len(self.value) > most:
            raise InvalidRequest(f"{self.kind} of {len(self.value)} characters: {most} at most")
        if self.after == "":
            raise InvalidRequest(
                "a structure begins after some text, not after ''; None is at once"
            )

    @classmethod
    def json_object(cls, *, after: str | None = None) -> StructuredOutputsParams:
        """Any JSON object."""
        return cls("json_object", "", after)

    @classmethod
    def json(
        cls, schema: dict[str, Any] | str | bool | type, *, after: str | None = None
    ) -> StructuredOutputsParams:
        """JSON of a schema, or of a pydantic model, the keys in the schema's order.

        White space is bounded: a space, or a line break with 16 of indentation, between two signs,
        and no line breaks behind commas and colons.
        """
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, bool):
            if not schema:
                raise InvalidRequest("no JSON is of the schema false")
            schema = {}
        if is_longer(schema, MAX_TEXT):
            raise InvalidRequest(f"json has too many characters: {MAX_TEXT} at most")
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the schema is no JSON: {error}") from None
        return cls("json", text, after, in_known_keywords(read_object(text))[1])

    @classmethod
    def regex(cls, pattern: str, *, after: str | None = None) -> StructuredOutputsParams:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern, after)

    @classmethod
    def choice(cls, choices: Sequence[str], *, after: str | None = None) -> StructuredOutputsParams:
        """One of these strings."""
        if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
            raise InvalidRequest("a choice is a list of strings, one at least")
        if is_longer([*choices], MAX_TEXT):
            raise InvalidRequest(f"choice has too many characters: {MAX_TEXT} at most")
        return cls("choice", json.dumps([*choices]), after)

    @classmethod
    def grammar(cls, text: str, *, after: str | None = None) -> StructuredOutputsParams:
        """Text that a context-free grammar derives."""
        return cls("grammar", text, after)
