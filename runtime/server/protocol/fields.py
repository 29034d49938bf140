"""The kinds of values that bodies consist of, and what they refuse."""

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
    TypeAdapter,
    model_validator,
)

from radixcache.runtime.tokens.tool_calls import flaw_of

MAX_LOGPROBS = 20
MAX_STOPS = 64
"""Stop strings of a request, and stop tokens: each is looked for in every step."""
MAX_STOP_LENGTH = 4096
"""Characters of all stop strings of a request."""

MAX_ITEMS = 10_000
"""Messages, parts of them, or tools of a request; tokens with a bias."""

MAX_SCHEMAS = 1 << 20
"""Characters of the schemas of all tools of a request."""

MAX_SHOWN_IDS = 100_000
"""Token ids that are made text for a client."""

T = TypeVar("T")


def _check_text(text: str) -> str:
    """JSON can say half of a surrogate pair, which is no text."""
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
    """JSON's keys are strings. Only the first that is wrong is told."""
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
    """Nobody else is answered while they are looked at, a tenth of a millisecond each."""
    lists, count = [items] if isinstance(items, list) else [], 0
    while lists:
        for item in lists.pop():
            count += 1
            if isinstance(item, dict):
                lists += [value for value in item.values() if isinstance(value, list)]
            if count > MAX_ITEMS:
                raise ValueError(f"at most {MAX_ITEMS} items, with those that are in them")
    return items


def _check_json(value: Any) -> Any:
    """What Python reads may not be what can be written again, or rendered."""
    if flaw := flaw_of(value):
        raise ValueError(flaw)
    return value


def _check_metadata(pairs: dict[str, Any]) -> dict[str, str]:
    """OpenAI's limits. Only the first that is wrong is told."""
    for key, value in pairs.items():
        if len(pairs) > 16 or len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise ValueError("at most 16 texts of 512 characters, with names of 64")
    return pairs


def _decode_header(text: str) -> str:
    """A header that is UTF-8, although it was read as Latin-1."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        raise ValueError("not UTF-8") from None


Text = Annotated[str, AfterValidator(_check_text)]
# An error for each item of a large body would take gigabytes, and all clients would wait for it.
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
# Once each: however often they are named, a step looks at each of them for each row.
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
    Unsupported("models here read and write text"),
)
"""What parts of a message have that are no text, in whichever API."""


class StrictModel(Body):
    """What a client asks for, of which no field is ignored that would change the answer.

    Attributes:
        harmless: names that are taken, since they change nothing here.
        refused: names that are refused, unless they ask for nothing; null never does.
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
            # The first one only: an error for each field of a large body would take gigabytes.
            _REFUSAL.validate_python({name[:64]: problem})
        return data


class OneOf(StrictModel):
    """A body whose `type` says which of its other fields there are."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> OneOf:
        kind = getattr(self, "type")  # noqa: B009
        for name in self.needs.get(kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a {kind} has a {name!r}")
        return self


def join_texts(content: str | list[Any] | None) -> str:
    """Content as one text, its parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(p.text or "" for p in content or ())
