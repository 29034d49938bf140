"""Functions that a model may call, and the calls in what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of an object.
        strict: the arguments of each call follow the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str | None = None
    strict: bool = False

    def as_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Which functions the next message calls.

    Attributes:
        mode: "none": what looks like a call is text; "required": one at least.
        names: those that may be called; all if empty.
        named: the client named the one function to call.
        parallel: more than one call is welcome.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True


class Call(NamedTuple):
    """A call of a function; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """What an answer gained.

    Attributes:
        text: of a "call" the function's name, of "arguments" a bit of JSON text.
        call: which call of the answer it belongs to.
        call_id: of a "call".
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0
    call_id: str = ""
