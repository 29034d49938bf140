"""Makes tokens of what a request's body says: of its prompt, and of its answer if that is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from radixcache.bench.workloads.byte_level_bpe import Encode
from radixcache.bench.workloads.loaders import as_json
from radixcache.bench.workloads.workload import Tokens

if TYPE_CHECKING:
    from radixcache.runtime.tokens.tokenizer import Tokenizer

Message = dict[str, Any]
"""As chat templates take it: its content is a text."""

Rendered = tuple[list[Tokens], Tokens]
"""A prompt in parts, and the answer, empty if that is unknown."""


class Joined:
    """Without a model: tools, then message after message."""

    how = "without a chat template (--model M has one)"

    def __init__(self, encode: Encode) -> None:
        self._tokens = cache(
            lambda text: np.array(encode(text.encode(errors="replace").decode()), np.int32)
        )

    def render(
        self, prompt: str | Sequence[Message], tools: list[Any], answer: Message | None
    ) -> Rendered:
        texts = [prompt] if isinstance(prompt, str) else [*map(spoken, prompt)]
        if tools:
            texts.insert(0, as_json(tools))
        return [*map(self._tokens, texts)], self._tokens(spoken(answer) if answer else "")


class Templated:
    """As a server of the model has it: its chat template, and what was tokens before stays them."""

    how = "in the model's chat template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from radixcache.runtime.tokens.history import TokenHistory

        self._tokenizer = tokenizer
        self._history = TokenHistory(tokenizer)

    def render(
        self, prompt: str | Sequence[Message], tools: list[Any], answer: Message | None
    ) -> Rendered:
        said = spoken(answer) if answer else ""
        if isinstance(prompt, str):
            return [np.array(self._tokenizer.encode(prompt), np.int32)], self._plain(said)
        text = self._tokenizer.render_chat(prompt, tools=tools)
        before = self._history.encode(text)
        if answer:
            whole = self._tokenizer.render_chat([*prompt, answer], tools=tools, ask=False)
            # Some templates write a past answer otherwise than the model wrote it, less thoughts.
            said = whole[len(text) :].rstrip() if whole.startswith(text) else said
            self._history.remember(before, self._plain(said).tolist())
        return [before.tokens], self._plain(said)

    def _plain(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, special=False), np.int32)


Renderer = Joined | Templated


def spoken(message: Message) -> str:
    """Its text, and its calls of tools as JSON."""
    calls = message.get("tool_calls", ())
    return message["content"] + "".join(as_json(call.get("function", call)) for call in calls)
