"""The kinds of values that bodies consist of, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_LOGPROBS = 20
MAX_STOPS = 64
"""Stop strings of a request, and stop tokens: each is looked for in every step."""
MAX_STOP_LENGTH = 4096
"""Characters of all stop strings of a request."""

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


def _decode_header(text: str) -> str:
    """A header that is UTF-8, although it was read as Latin-1."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        raise ValueError("not UTF-8") from None


Text = Annotated[str, AfterValidator(_check_text)]
# An error for each item of a large body would take gigabytes, and all clients would wait for it.
List = Annotated[list[T], Field(fail_fast=True)]
TokenIds = List[Annotated[int, Field(ge=0, lt=2**31)]]
Salt = Annotated[Text, Field(min_length=1, max_length=512)]
HeaderSalt = Annotated[str, AfterValidator(_decode_header), Field(min_length=1, max_length=512)]
PrefixName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class Body(BaseModel):
    """The body of a request or an answer."""

    model_config = ConfigDict(allow_inf_nan=False)


class Strict(Body):
    """A body none of whose fields is ignored, but for some that change nothing here."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Names that are known and change nothing."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Names that are known and would change something, and what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _ignores_nothing(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name in cls.model_fields or name in cls.harmless or not given[name]:
                continue
            if name in cls.refused:
                raise ValueError(f"{name} is not supported: {cls.refused[name]}")
            raise ValueError(f"there is no field {name!r}")
        return given
