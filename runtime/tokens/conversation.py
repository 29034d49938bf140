"""Token-stable conversations: answers keep their generated tokens, also in tool calls."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from threading import Lock
from typing import Any, NamedTuple, Protocol

from radixcache.errors import InvalidRequest
from radixcache.runtime.tokens.history import TokenHistory, TokenisedText
from radixcache.runtime.tokens.tool_calls import (
    ParsedMessage,
    for_template,
    image_of,
    image_parts,
    spelling,
)
from radixcache.runtime.tokens.tool_formats import THINK
from radixcache.runtime.tokens.tool_parser import MessageParser
from radixcache.tokens import Tokens

_Message = Mapping[str, Any]


class Images(Protocol):
    """What a model makes of images in a prompt."""

    def prepare(self, given: Sequence[Any], cache_salt: str | None = None) -> list[Any]:
        """The images that were given, as the model reads them; `InvalidRequest` if one is none,
        or the model takes none."""

    def write(self, text: str, images: Sequence[Any]) -> str:
        """A rendered text with what stands for each image's rows in place of its placeholder."""

    def place(self, tokens: Tokens, images: Sequence[Any]) -> tuple[Any, ...]:
        """The images with their places in a prompt."""


class _Turn(NamedTuple):
    """A turn as the model wrote it, parsed, and its meaning if parsed without schemas."""

    raw: str
    message: ParsedMessage
    meaning: tuple[Any, ...]


class Conversations:
    """Tokenises conversations so that they keep the tokens of generated answers.

    Clients send content back as it was generated, but tool calls in parts, which a chat template
    spells its own way: other spaces, another order of keys. The text of a turn with calls is
    therefore kept, by the id of its first call. If the calls come back with equal names and
    arguments, the kept text replaces the template's. To find its place, the conversation is
    rendered a second time with marks in place of such turns.

    For any number of threads.

    Args:
        images: what the model makes of them.
        max_bytes: approximate limit on kept texts; the oldest are forgotten.
    """

    def __init__(self, history: TokenHistory, images: Images, max_bytes: int = 16 << 20) -> None:
        self.history, self.images = history, images
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = Lock()
        self._turns: OrderedDict[tuple[str | None, str], _Turn] = OrderedDict()
        """Kept turns, by salt and the id of the first call."""

    def encode(
        self, messages: Sequence[_Message], cache_salt: str | None = None, **how: Any
    ) -> TokenisedText:
        """The prompt that a conversation makes; `how` as in `Tokenizer.render_chat`."""
        parts, text = image_parts(messages), self.render(messages, cache_salt, **how)
        if not parts:
            return self.history.encode(text, cache_salt)
        self.images.prepare(())  # refuses, if the model takes none
        images = self.images.prepare([*map(image_of, parts)], cache_salt)
        prompt = self.history.encode(self.images.write(text, images), cache_salt)
        return replace(prompt, images=self.images.place(prompt.tokens, images))

    def remember(
        self, prompt: TokenisedText, generated: Sequence[int], message: ParsedMessage | None = None
    ) -> None:
        """Let conversations go on from an answer, which was parsed as `message`."""
        raw = self.history.remember(prompt, generated)
        if raw and message:
            self.keep(message, thoughts_of(prompt.text) + raw, prompt.cache_salt)

    def keep(self, message: ParsedMessage, raw: str, cache_salt: str | None = None) -> None:
        """From now on, render the turn of `message` as `raw`, if it has calls.

        Does nothing if `raw` says more, which happens if a stop string cut the answer.
        """
        if not message.calls:
            return
        read = self._read(raw)
        names = [[call.name for call in one.calls] for one in (read, message)]
        if names[0] != names[1] or read[:2] != message[:2]:
            return
        with self._lock:
            self._turns[cache_salt, message.calls[0].id] = _Turn(raw, message, read.meaning)
            self._num_bytes += 4 * len(raw)  # the text and its parsed parts
            while self._num_bytes > self.max_bytes:
                _, oldest = self._turns.popitem(last=False)
                self._num_bytes -= 4 * len(oldest.raw)

    def clear(self) -> None:
        """Forget all texts and turns."""
        self.history.clear()
        with self._lock:
            self._turns.clear()
            self._num_bytes = 0

    def kept(self) -> list[tuple[str, ParsedMessage]]:
        """The kept turns without a salt, the oldest first."""
        with self._lock:
            turns = [turn for (salt, _), turn in self._turns.items() if salt is None]
        return [(turn.raw, turn.message) for turn in turns]

    def render(
        self, messages: Sequence[_Message], cache_salt: str | None = None, **how: Any
    ) -> str:
        """The text of a conversation, its turns as generated; `how` as in `encode`."""
        tokenizer, how = self.history.tokenizer, {**how, "with_images": True}
        found = [self._find(message, cache_salt) for message in messages]
        known = {i: turn for i, turn in enumerate(found) if turn}
        if not known:
            return tokenizer.render_chat(messages, **how)
        mark = token_hex(16)
        whole, marked = [*messages], [*messages]
        for i, turn in known.items():
            if turn.message.reasoning and "reasoning_content" not in messages[i]:
                whole[i] = {**messages[i], "reasoning_content": turn.message.reasoning}
            marked[i] = {"role": "assistant", "content": f"{mark}{i}{mark}"}
        text = tokenizer.render_chat(whole, **how)
        try:
            pieces = re.split(f"{mark}([0-9]+){mark}", tokenizer.render_chat(marked, **how))
        except InvalidRequest:  # such as a tool's result without a call before it
            return text
        parts, at = [pieces[0]], len(pieces[0])
        if not text.startswith(pieces[0]) or not text.endswith(pieces[-1]):
            return text
        for index, following in zip(pieces[1::2], pieces[2::2], strict=True):
            last = len(parts) + 2 == len(pieces)
            end = len(text) - len(following) if last else text.find(following, at)
            if end < at:
                return text
            turn, rendered = known[int(index)], text[at:end]
            same = self._read(rendered).meaning == turn.meaning
            parts += [turn.raw if same else rendered, following]
            at = end + len(following)
        return "".join(parts)

    def _find(self, message: _Message, cache_salt: str | None) -> _Turn | None:
        """The kept turn that equals a message, if there is one."""
        calls = isinstance(message, Mapping) and message.get("tool_calls")
        if not calls:
            return None
        message = for_template(message)
        with self._lock:
            turn = self._turns.get((cache_salt, str(message["tool_calls"][0].get("id"))))
        if turn is None or message["content"] != turn.message.content:
            return None
        functions = [call["function"] for call in message["tool_calls"]]
        named = [(function["name"], spelling(function["arguments"])) for function in functions]
        return turn if named == turn.message.meaning[-1] else None

    def _read(self, text: str) -> ParsedMessage:
        tokenizer = self.history.tokenizer
        parser = MessageParser(tokenizer.tool_format, tokenizer.reasons)
        parser.feed(text, ended=True)
        return parser.message()


def thoughts_of(prompt: str) -> str:
    """The end of a prompt that opens thoughts for its answer; else ""."""
    at = prompt.rfind(THINK)
    return prompt[at:] if at >= 0 and prompt[at:].strip() == THINK else ""
