"""Tokenises prompts, to decide where requests go.

Replicas read requests again, and what they computed is booked at the end. So nothing is refused
here: a request that cannot be read has a prompt of no tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, cast

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.api.chat_turn import turn_of
from radixcache.runtime.server.http.bodies import read_json
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.anthropic import CountRequest, MessagesRequest
from radixcache.runtime.server.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    ExplainRequest,
    PrefixRequest,
)
from radixcache.runtime.server.protocol.responses import ResponsesRequest
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer
from radixcache.tokens import Tokens, as_tokens

Body = Mapping[str, Any]


def parse(body: bytes) -> Body:
    """The fields of a body; empty if it is no JSON object."""
    with suppress(ApiError):
        fields = read_json(body)
        if isinstance(fields, dict):
            return fields
    return {}


_KINDS: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/completions": CompletionRequest,
    "/v1/explain": ExplainRequest,
}


class Prompts:
    """Tokenises prompts with a model's tokenizer, if it has one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens: float = inf

    def limit(self, max_tokens: int) -> None:
        """Set the model's context: longer texts are not tokenised, and longer prompts are empty."""
        self._max_tokens = max_tokens
        if self._tokenizer is not None:
            self._tokenizer = self._tokenizer.limited(max_tokens)

    def read(self, path: str, body: Body, prefix: Body | None = None) -> Tokens:
        """[n] the prompt of a request to `path`, after the prefix that it names."""
        tokens: list[int] = []
        with suppress(Exception):  # the replica will report any error
            if prefix is not None and "messages" in prefix and "messages" in body:
                body, prefix = {**body, "messages": [*prefix["messages"], *body["messages"]]}, None
            given = cast(Tokenizer, self._tokenizer)  # not used for token ids
            pinned = PrefixRequest(**prefix).encode(given) if prefix else ()
            tokens = [*pinned, *_encode(_KINDS[path](**body), given)]
        return as_tokens(tokens if len(tokens) <= self._max_tokens else [])


def _encode(body: Any, tokenizer: Tokenizer) -> list[int]:
    wanted = body.request if isinstance(body, ExplainRequest) else body
    if isinstance(wanted, CompletionRequest):
        prompt = wanted.prompts[0]
        special = wanted.prefix is None and wanted.add_special_tokens is not False
        return prompt if isinstance(prompt, list) else tokenizer.encode(prompt, special=special)
    turn = turn_of(wanted, SamplingParams(), tokenizer)
    text = tokenizer.render_chat([*map(_without_images, turn.messages)], **turn.rendering)
    return tokenizer.encode(text, special=False)


def _without_images(message: Message) -> Message:
    """Only replicas read images: what comes before the first one decides."""
    content = message["content"]
    if isinstance(content, str):
        return message
    texts = (part["text"] for part in content if part["type"] == "text")
    return {**message, "content": "\n".join(texts)}


def load_prompts(model: str | Path | None) -> Prompts:
    """The `Prompts` of a model, the bundled one by default, in a process without torch.

    Raises:
        ModelError: the tokenizer does not load.
    """
    # Tells transformers that torch is not installed: importing it takes seconds and most of the
    # memory, and nothing computes here.
    cast(dict[str, Any], sys.modules).setdefault("torch", None)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing
    return Prompts(Tokenizer.load(str(model or BUNDLED_MODEL)))
