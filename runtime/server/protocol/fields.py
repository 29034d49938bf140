"""Types of fields, with their limits, and base classes of bodies."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from fastapi import Header
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    model_validator,
)

from radixcache.runtime.tokens.tool_calls import flaw_of

MAX_LOGPROBS = 20
MAX_STOPS = 64
"""Stop strings or stop tokens of a request: every step looks for each."""
MAX_STOP_LENGTH = 4096
"""Characters of all stop strings of a request."""

MAX_ITEMS = 10_000
"""Messages, parts of them, or tools of a request; tokens with a bias."""

MAX_SCHEMAS = 1 << 20
"""Characters of the schemas of all tools of a request."""

MAX_SHOWN_IDS = 100_000
"""Token ids of a request to /detokenize."""

T = TypeVar("T")


def _check_text(text: str) -> str:
    """JSON can hold half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode: half of a surrogate pair") from None
    return text


def check_stop(stop: str | list[str] | None) -> str | list[str] | None:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS or sum(map(len, strings)) > MAX_STOP_LENGTH:
        raise ValueError(f"at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters together")
    return stop


def _check_bias(bias: dict[str, Any]) -> dict[int, float]:
    """Convert JSON's string keys; only the first error is reported."""
    checked: dict[int, float] = {}
    if len(bias) > MAX_ITEMS:
        raise ValueError(f"at most {MAX_ITEMS} tokens have a bias")
    for token, value in bias.items():
        if not token.isdecimal() or len(token) > 9:
            raise ValueError(f"its keys are token ids, and {token[:20]!r} is none")
        if not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"a bias is a number in [-100, 100], and that of {token} is not")
        checked[int(token)] = value
    return checked


def _check_count(items: Any) -> Any:
    """Checking an item takes a tenth of a millisecond, in which no other client is answered."""
    lists, count = [items] if isinstance(items, list) else [], 0
    while lists:
        for item in lists.pop():
            count += 1
            if isinstance(item, dict):
                lists += [value for value in item.values() if isinstance(value, list)]
            if count > MAX_ITEMS:
                raise ValueError(f"at most {MAX_ITEMS} items, nested ones included")
    return items


def _check_json(value: Any) -> Any:
    """Python reads some JSON that it cannot write again, or render."""
    if flaw := flaw_of(value):
        raise ValueError(flaw)
    return value


def _check_metadata(pairs: dict[str, Any]) -> dict[str, str]:
    """OpenAI's limits; only the first error is reported."""
    for key, value in pairs.items():
        if len(pairs) > 16 or len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise ValueError("at most 16 texts of 512 characters, with names of 64")
    return pairs


def _decode_header(text: str) -> str:
    """Read a header as UTF-8 that was decoded as Latin-1."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        raise ValueError("not UTF-8") from None


Text = Annotated[str, AfterValidator(_check_text)]
Flag = Annotated[bool, Strict()]  # else "no" and 0 were booleans, too
# fail_fast: an error for each item of a large body would take gigabytes, and hold up all clients.
List = Annotated[list[T], Field(fail_fast=True)]
Items = Annotated[List[T], BeforeValidator(_check_count)]
SomeItems = Annotated[List[T], Field(min_length=1), BeforeValidator(_check_count)]
TokenIds = List[Annotated[int, Field(ge=0, lt=2**31)]]

Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MaxTokens = Annotated[int, Field(ge=0)]
Stop = Annotated[Text | List[Text] | None, AfterValidator(check_stop)]
ToolName = Annotated[Text, Field(pattern=r"^[^\s\"<>{}\[\]]{1,128}$")]
Json = Annotated[dict[str, Any], BeforeValidator(_check_json)]
Metadata = Annotated[Json, AfterValidator(_check_metadata)]
# Without repetitions: a step looks at each of them for each row.
Allowed = Annotated[
    TokenIds, AfterValidator(lambda ids: [*dict.fromkeys(ids)]), Field(min_length=1)
]
LogitBias = Annotated[dict[str, Any], AfterValidator(_check_bias)]
Salt = Annotated[Text, Field(min_length=1, max_length=512)]
_HeaderSalt = Annotated[str, AfterValidator(_decode_header), Field(min_length=1, max_length=512)]
CacheSalt = Annotated[_HeaderSalt | None, Header()]
PrefixName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class Body(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


def _refuse(problem: str) -> str:
    raise ValueError(problem)


_REFUSAL = TypeAdapter(dict[str, Annotated[str, AfterValidator(_refuse)]])
"""Given {field: problem}, raises the error that a field of that name would raise."""


class Unsupported(NamedTuple):
    """A field that is not supported: what to do instead, and values that ask for nothing."""

    instead: str
    off: tuple[Any, ...] = ()


NO_MEDIA = dict.fromkeys(
    "image_url input_audio audio_url video_url file source detail file_id file_data "
    "file_url".split(),
    Unsupported("send text, or an image as this API writes it"),
)
"""Fields of a message's parts that are neither text nor, in some API, an image."""


class StrictModel(Body):
    """A body that ignores no field which would change the answer.

    Attributes:
        harmless: fields that are accepted, since they change nothing here.
        refused: fields that are refused, unless their value asks for nothing, as null does.
    """

    harmless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Unsupported]] = {}

    @model_validator(mode="before")
    @classmethod
    def _knows_every_field(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name in cls.model_fields or name in cls.harmless or data[name] is None:
                continue
            problem = "there is no such field"
            if name in cls.refused:
                instead, off = cls.refused[name]
                if any(data[name] == value for value in off):
                    continue
                problem = f"not supported: {instead}"
            elif near := get_close_matches(name[:64], [*cls.model_fields, *cls.refused], 1):
                problem += f": did you mean {near[0]}?"
            # Only the first: an error for each field of a large body would take gigabytes.
            _REFUSAL.validate_python({name[:64]: problem})
        return data


class OneOf(StrictModel):
    """A body whose `type` says which other fields it must have."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> OneOf:
        kind = getattr(self, "type")  # noqa: B009
        for name in self.needs.get(kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a {kind} needs {name!r}")
        return self


def join_texts(content: str | list[Any] | None) -> str:
    """Content as one text, its parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(p.text or "" for p in content or ())
