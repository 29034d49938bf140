"""Images in messages, as each API writes them. A `Turn` has them by their URLs, as chat completions
do; they are read later, on a thread."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, model_validator

from radixcache.errors import InvalidRequest
from radixcache.runtime.server.protocol.fields import (
    NO_MEDIA,
    OneOf,
    StrictModel,
    Text,
    join_texts,
)
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import for_template

P = TypeVar("P")


def _check_detail(detail: str) -> str:
    if detail == "low":
        raise ValueError("images are read in their own detail: make a small one of it yourself")
    if detail not in ("auto", "high", "original"):
        raise ValueError("the detail of an image is auto or high")
    return detail


Detail = Annotated[Text, AfterValidator(_check_detail)]
"""Changes nothing: the model's own processor says how large an image is to it."""


class ImageUrl(StrictModel):
    """An image of chat completions."""

    url: Text
    detail: Detail | None = None


class Source(OneOf):
    """An image of Anthropic's API; after it is checked, it always has a `url`."""

    refused: ClassVar = {"file_id": NO_MEDIA["file_id"]}
    needs: ClassVar = {"base64": ("media_type", "data"), "url": ("url",)}

    type: Literal["base64", "url"]
    media_type: Text | None = None
    data: Text | None = None
    url: Text | None = None

    @model_validator(mode="after")
    def _as_url(self) -> Source:
        if self.type == "base64":
            self.url, self.data = f"data:{self.media_type};base64,{self.data}", None
        return self


def check_part(part: P) -> P:
    """Refuse a part that would be two; `image` is its image's URL, `text` its text, else None."""
    given: Any = part
    if given.image is not None and (given.text is not None or "image" not in given.type):
        raise ValueError("a part is a text or an image, not both")
    return part


def content_of(
    parts: str | list[Any] | None, role: str, before: str = ""
) -> str | list[dict[str, Any]]:
    """Content of a message: one text, as `join_texts`, or a list of parts if one is an image. The
    text `before` begins it.

    Raises:
        InvalidRequest: messages of this role have no images.
    """
    given = parts if isinstance(parts, list) else []
    if not any(part.image for part in given):
        return before + join_texts(parts)
    if role not in ("user", "tool"):
        raise InvalidRequest(f"images are in messages of users and tools, not of role {role!r}")
    content: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    for part in given:
        if part.image is None:
            content.append({"type": "text", "text": part.text or ""})
        else:
            content.append({"type": "image_url", "image_url": {"url": part.image}})
    return content


def with_images(message: Message) -> Message:
    """A message `for_template`, whose content may be as `content_of` gives it."""
    if not isinstance(content := message.get("content"), list):
        return for_template(message)
    return {**for_template({**message, "content": ""}), "content": content}
