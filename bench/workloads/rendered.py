"""Requests of texts as workloads: rendered by a model's chat template, or joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixcache.bench.workloads import texts
from radixcache.bench.workloads.byte_level_bpe import Encode
from radixcache.bench.workloads.records import name_of
from radixcache.bench.workloads.texts import Asked, Message, as_json, spoken
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import InvalidRequest

if TYPE_CHECKING:
    from radixcache.runtime.tokens.tokenizer import Tokenizer

TEXTS: dict[str, Callable[[Path, int | None], list[Asked]]] = {
    "requests": texts.read_requests,
    "sharegpt": texts.read_sharegpt,
    "messages": texts.read_messages,
    "prompts": texts.read_prompts,
}

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
    """Renders as a server does: by the model's chat template; earlier turns keep their tokens."""

    how = "in the model's chat template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from radixcache.runtime.tokens.history import TokenHistory

        self._tokenizer = tokenizer
        self._history = TokenHistory(tokenizer)

    def render(
        self, prompt: str | Sequence[Message], tools: list[Any], answer: Message | None
    ) -> Rendered:
        generated = spoken(answer) if answer else ""
        if isinstance(prompt, str):
            return [np.array(self._tokenizer.encode(prompt), np.int32)], self._plain(generated)
        text = self._tokenizer.render_chat(prompt, tools=tools)
        before = self._history.encode(text)
        if answer:
            whole = self._tokenizer.render_chat([*prompt, answer], tools=tools, ask=False)
            # Some templates write a past answer otherwise than the model wrote it, less thoughts.
            generated = whole[len(text) :].rstrip() if whole.startswith(text) else generated
            self._history.remember(before, self._plain(generated).tolist())
        return [before.tokens], self._plain(generated)

    def _plain(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, special=False), np.int32)


def load_texts(
    path: Path, kind: str, renderer: Joined | Templated, *, limit: int | None = None
) -> Workload:
    """The requests of a file, one of `TEXTS`. Several models share nothing."""
    asked = TEXTS[kind](path, limit)
    if not asked:
        raise InvalidRequest(f"{path}: no request in it")
    models = list(dict.fromkeys(one.model for one in asked))
    known = sum(one.answer is not None for one in asked)
    shape = f"requests {renderer.how}, {known:,} answers known"
    if len(models) > 1:
        shape += f", to {len(models)} models, which share nothing"
    workload, rng = Workload(name_of(path), shape), np.random.default_rng(0)
    for one in asked:
        text = one.messages or (one.prompt if isinstance(one.prompt, str) else "")
        try:
            parts, generated = renderer.render(text, one.tools, one.answer)
        except InvalidRequest as error:
            raise InvalidRequest(f"{one.where}: {error}") from None
        parts = parts if text else [np.array(one.prompt, np.int32)]
        if not any(map(len, parts)):
            raise InvalidRequest(f"{one.where}: a prompt without a token")
        if len(models) > 1:
            parts = [np.array([models.index(one.model)], np.int32), *parts]
        if not len(generated):
            generated = rng.integers(0, 1000, one.length, dtype=np.int32)
        workload.add(parts, generated, after=one.after, turn=one.turn)
    return workload
