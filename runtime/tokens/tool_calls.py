"""Tools that a model may call, and its parsed messages: content, thoughts and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, NamedTuple

from radixcache.errors import InvalidRequest

MAX_DEPTH = 100
"""Levels of JSON; code that writes or renders deeper values may fail."""

MAX_VALUES = 1_000_000
"""Numbers in a JSON text. Reading so many holds the GIL for a twentieth of a second; what takes
longer counts more: see `_WEIGHTS`."""

TOO_MANY = f"more than {MAX_VALUES:,} values, of which a name counts as ten"

_WEIGHTS = {b",": 1, b":": 8, b"[": 4, b"{": 4}
"""Weights of signs outside of strings. A string counts one, and thus a name ten."""

_COUNTED = 1 << 20
"""Bytes that are counted before other threads get their turn."""


def has_too_many_values(text: bytes) -> bool:
    """Whether reading this JSON would take too long; known in a fraction of that time."""
    if len(text) * max(_WEIGHTS.values()) <= MAX_VALUES:
        return False
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    count, in_text = plain.count(b'"') // 2, 0
    for start in range(0, len(plain), _COUNTED):
        if count > MAX_VALUES:
            break
        pieces = plain[start : start + _COUNTED].split(b'"')
        outside = b"".join(pieces[in_text::2])
        in_text ^= (len(pieces) - 1) % 2
        count += sum(weight * outside.count(mark) for mark, weight in _WEIGHTS.items())
    return count > MAX_VALUES


def read_json(text: str) -> Any:
    """The value of a JSON text; `ValueError` if it is no JSON, or has a flaw."""
    if has_too_many_values(text.encode("utf-8", "surrogatepass")):
        raise ValueError(TOO_MANY)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if (flaw := flaw_of(value)) is not None:
        raise ValueError(flaw)
    return value


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of an object.
        strict: the arguments of each call must follow the schema.
        deferred: the conversation describes the tool later, not the system message.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    description: str | None = None
    strict: bool = False
    deferred: bool = False

    def as_template(self) -> dict[str, Any]:
        """Describe it as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Which functions the next message may or must call.

    Attributes:
        mode: "none": calls are text; "required": there is at least one call.
        names: the functions that may be called; all if empty.
        named: the client named the one function to call.
        parallel: more than one call is allowed.
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

    def as_template(self) -> dict[str, Any]:
        """Describe it as chat templates take it."""
        function = {"name": self.name, "arguments": arguments_of(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ParsedDelta(NamedTuple):
    """A piece that an answer gained.

    Attributes:
        text: the function's name for a "call", a piece of JSON text for "arguments".
        call: index of the answer's call that the piece belongs to.
        call_id: the id, for a "call".
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0
    call_id: str = ""


class ParsedMessage(NamedTuple):
    """A whole answer; "" for absent parts."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def meaning(self) -> tuple[Any, ...]:
        """A value that is equal for answers which differ only in spelling and ids."""
        functions = [call.as_template()["function"] for call in self.calls]
        calls = [(one["name"], spelling(one["arguments"])) for one in functions]
        return self.content, self.reasoning, calls


def called_by(values: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """The name and the arguments of an object that may be a call; None for the latter if not."""
    inner = values.get("function")
    values = inner if isinstance(inner, dict) else values
    name = values.get("name", inner)
    given = [values[key] for key in ("arguments", "parameters") if values.get(key) is not None]
    arguments = given[0] if given else {}
    arguments = read_object(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", None
    return name, arguments


def spelling(arguments: Any) -> str:
    """Text that is equal for equal arguments; in Python, True equals 1."""
    return json.dumps(arguments, sort_keys=True)


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None if it is none, or has a flaw."""
    try:
        values = read_json(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; text that is no JSON object, perhaps cut off, as in Anthropic's API."""
    values = read_object(text or "{}")
    return {"INVALID_JSON": text} if values is None else values


def _levels(value: Any) -> Iterator[list[Any]]:
    """The parts of a JSON value, names included, by depth."""
    level = [value]
    while level:
        yield level
        lists = [x for one in level if isinstance(one, list) for x in one]
        objects = [one for one in level if isinstance(one, dict)]
        level = [*lists, *(x for one in objects for pair in one.items() for x in pair)]


def is_longer(value: Any, most: int) -> bool:
    """Whether a value surely has more than `most` characters as JSON, without writing it."""
    for level in _levels(value):
        most -= sum(len(one) if isinstance(one, str) else 1 for one in level)
        if most < 0:  # also ends on a value that contains itself
            return True
    return False


def flaw_of(value: Any) -> str | None:
    """Why a value that was read as JSON cannot be written as JSON; None if it can. O(its size).

    Writing it would hold the GIL; this lets other threads run.
    """
    for depth, level in enumerate(_levels(value)):
        if depth == MAX_DEPTH:
            return f"nested deeper than {MAX_DEPTH} levels"
        if not all(isfinite(one) for one in level if isinstance(one, float)):
            return "NaN and infinity are no numbers of JSON's"
        try:
            for text in level:
                if isinstance(text, str):
                    text.encode()
        except UnicodeEncodeError:
            return "not valid Unicode: half of a surrogate pair"
    return None


_IMAGES = ("image", "image_url")
"""Types of parts; the image is in the field of that name."""


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: `content` is a string, or with images a list of parts;
    calls' arguments are dicts.

    Raises:
        InvalidRequest: content is missing, or neither text nor image; or arguments are neither text
            nor object.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise InvalidRequest("'tool_calls' is a list")
        message["tool_calls"] = [*map(_call_for_template, calls)]
        message.setdefault("content", "")
    if not {"role", "content"} <= message.keys():
        raise InvalidRequest("a chat message has a 'role' and a 'content'")
    if not isinstance(message["content"], str):
        message["content"] = _content_of(message["content"])
    return message


def _content_of(parts: Any) -> str | list[dict[str, Any]]:
    """Content in parts: one text, or with images its parts."""
    if not isinstance(parts, Sequence):
        raise InvalidRequest("the content of a message is a text, or a list of parts")
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in _IMAGES:
            found.append({"type": "image"})
        elif kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"only text and images can be in a message, not a part of type {kind!r}"
            )
        else:
            found.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in found):
        return found
    return "\n".join(part["text"] for part in found)


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The parts of messages that are images, in order."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    lists = (content for content in contents if isinstance(content, list | tuple))
    parts = (part for content in lists for part in content if isinstance(part, Mapping))
    return [part for part in parts if part.get("type") in _IMAGES]


def image_of(part: Mapping[str, Any]) -> Any:
    """The image of a part, as it was given; `InvalidRequest` for none, and for an `image_url` that
    is no data: URL, since it may be of anything."""
    given = part.get(part["type"])
    if part["type"] == "image":
        if given is None:
            raise InvalidRequest(
                "an image is {'type': 'image', 'image': ...}, with its path, bytes or a PIL image"
            )
        return given
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise InvalidRequest(
            "an image_url is a data: URL; a path, bytes or a PIL image is {'type': 'image', "
            "'image': ...}"
        )
    return url


def joined(*contents: str | list[dict[str, Any]]) -> Any:
    """Texts, and contents in parts, as one content: a text if there are no parts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)  # type: ignore[arg-type]
    parts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents)
    return [part for content in parts for part in content]


def check_tools(tools: Any) -> None:
    """Refuse tools that are not described as in OpenAI's chat API."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                "a tool is {'type': 'function', 'function': {'name': ..., 'parameters': ...}}: "
                "its name goes under 'function', not beside it"
            )


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        arguments = arguments_of(arguments) if isinstance(arguments, str) else arguments
    except (LookupError, TypeError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(
            "a tool call has a 'function' with a 'name' and 'arguments': an object, or JSON text"
        )
    return {**call, "function": {"name": name, "arguments": arguments}}
