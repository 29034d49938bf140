"""Text to token ids and back, through the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixcache.errors import InvalidRequest


class Tokenizer:
    """The tokenizer of a model folder or hub id."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = tokenizer
        # Called for every generated token: what transformers wraps around it takes three times as
        # long as decoding.
        self._backend: Any = None
        if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
            self._backend = tokenizer.backend_tokenizer

    @classmethod
    def load(cls, name_or_path: str) -> Tokenizer | None:
        """The model's tokenizer, or None if it has none."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(name_or_path))
        except (OSError, ValueError, KeyError):
            return None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the model wants around a text, such as BOS."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`, without special tokens if not told otherwise."""
        text: str
        if self._backend is not None:
            text = self._backend.decode(ids, skip_special_tokens=not special)
            return text
        text = self._tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, ask: bool = True) -> str:
        """The text of a conversation, by the model's chat template.

        It ends by asking for the assistant's next message, if not told otherwise.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise InvalidRequest("a chat message has a 'role' and a 'content'")
        if not self._tokenizer.chat_template:
            raise InvalidRequest("the model has no chat template: use generate, not chat")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:  # a template raises what it likes
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return text
