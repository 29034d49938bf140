"""Tells how many tokens a text has at least, without tokenising it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from math import ceil, inf
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

_COMPOSED = 4  # code points, at most, that NFC makes one of (UAX #15: how far NFD expands)
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Prepend", "Lowercase", "NFD", "NFKD"}
"""Normalisers and pre-tokenizers that take no character away."""


class TextBound:
    """The most characters that one token of a tokenizer can stand for.

    They are those of its longest token, if nothing between a text and its tokens takes characters
    away or makes one token of any number of unknown ones. Where that is not certain, there is no
    bound, and every text may have 0 tokens.

    Args:
        backend: of the tokenizers library.
    """

    def __init__(self, backend: Tokenizer) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder().values()
        self._characters: float = max(map(len, vocabulary), default=inf)
        self._composed = 1
        self._strips = any(token.lstrip or token.rstrip for token in added)
        kinds = set()
        for part in (*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)):
            kinds.add(part["type"])
            self._account_for(part)
        if not self._knows_all(backend.model, vocabulary.keys(), "ByteLevel" in kinds):
            self._characters = inf

    @staticmethod
    def _knows_all(model: Any, vocabulary: Set[str], of_bytes: bool) -> bool:
        """Whether each character gets a token of its own at least."""
        if not isinstance(model, models.BPE):
            return False
        if of_bytes:
            return vocabulary >= set(ByteLevel.alphabet())
        if model.byte_fallback and vocabulary >= {f"<0x{byte:02X}>" for byte in range(256)}:
            return True
        return model.unk_token in vocabulary and not model.fuse_unk

    def _account_for(self, part: dict[str, Any]) -> None:
        """What a normaliser or a pre-tokenizer may take away."""
        match part:
            case {"type": "NFC" | "NFKC"}:
                self._composed = _COMPOSED
            case {"type": "Strip"}:
                self._strips = True
            case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)}:
                self._characters *= max(1, len(before) / len(after)) if after else inf
            case {"type": "Split", "behavior": behavior} if behavior != "Removed":
                pass
            case {"type": kind} if kind not in _KEEPING:
                self._characters = inf

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than this come of the text. O(1), or O(len(text)) if spaces may go."""
        if self._characters == inf:
            return 0
        count = sum(map(len, text.split())) if self._strips else len(text)
        composed = 1 if self._composed == 1 or text.isascii() else self._composed
        return ceil(count / (self._characters * composed))


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """What a normaliser or a pre-tokenizer consists of."""
    state = [] if component is None else [json.loads(component.__getstate__())]
    while state:
        part = state.pop()
        nested = part.get("normalizers", part.get("pretokenizers"))
        if nested is None:
            yield part
        else:
            state += nested
