"""The notes that a disk store keeps for the next process besides KV: JSON by name. No torch.

Each tuple here is one array of JSON, in the order of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from radixcache.runtime.tokens.tokenizer import Message

ABOUT, PREFIXES, TEXTS = "about", "prefixes", "texts"
RESPONSE = "response "
"""The names of a server's stored responses begin so, and go on with the response's id."""


class AboutNote(NamedTuple):
    """The note `ABOUT`, an object: of which model the pages are, and how large one is."""

    model: str
    page_bytes: int


class PrefixNote(NamedTuple):
    """One of the note `PREFIXES`: a named prefix, pinned until `expires` (Unix time; None is for
    good), and the messages that it was rendered from, if any."""

    name: str
    tokens: list[int]
    expires: float | None
    messages: list[Message] | None


class TextNote(NamedTuple):
    """A text as it was tokenised: see `TokenisedText`."""

    text: str
    tokens: list[int]
    cuts: list[list[int]]
    num_generated: int


class TextsNote(NamedTuple):
    """The note `TEXTS`: what the tokenizer of this digest has seen, and each turn with tool calls
    as the model wrote it, with its content, reasoning and calls."""

    tokenizer: str = ""
    texts: Sequence[TextNote] = ()
    turns: Sequence[tuple[str, tuple[str, str, Sequence[Sequence[str]]]]] = ()


class ResponseNote(NamedTuple):
    """A note named `RESPONSE`: see `StoredResponse`."""

    conversation: list[Message]
    response: dict[str, Any]


def read_prefixes(notes: Mapping[str, str]) -> list[PrefixNote]:
    """The named prefixes of a store's notes."""
    return [PrefixNote(*prefix) for prefix in json.loads(notes.get(PREFIXES, "[]"))]


def read_texts(notes: Mapping[str, str]) -> TextsNote:
    """The texts and turns of a store's notes."""
    tokenizer, texts, turns = json.loads(notes.get(TEXTS, '["", [], []]'))
    return TextsNote(tokenizer, [TextNote(*text) for text in texts], turns)
