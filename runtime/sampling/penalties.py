"""The changes that a request makes to logits before sampling, with vLLM's meanings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.tokens import Tokens

NOTHING_LEFT = (
    "no token is left to go on with: what was asked for (allowed_token_ids, bad_words, "
    "logit_bias, min_tokens, a structure) forbids every one"
)
"""Why a sequence fails."""


class PenaltyState:
    """The penalties of one request, in the model's token ids.

    Args:
        end_tokens: the model's end tokens.
        encode: text to token ids, without special tokens; None if there is no tokenizer.

    Raises:
        InvalidRequest: it lists tokens that the model does not have, or words without a tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        end_tokens: Collection[int] = (),
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.params = params
        self.penalises = (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )
        bias = params.logit_bias or {}
        for name, ids in (
            ("logit_bias", bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids or ()),
        ):
            if any(not 0 <= token < vocab_size for token in ids):
                raise InvalidRequest(
                    f"{name} has token ids outside the vocabulary [0, {vocab_size})"
                )
        self._bias = np.array([*bias], np.int64), np.array([*bias.values()], np.float32)
        self.allowed = np.array([*(params.allowed_token_ids or ())], np.int64)
        self._ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else end_tokens)}
        self._bad_words = _sequences(params.bad_words or (), vocab_size, encode)
        self._longest = max(map(len, self._bad_words), default=1)
        self.any = bool(
            self.penalises or bias or len(self.allowed) or self._bad_words or params.min_tokens
        )

    def biases(
        self, generated: Tokens, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and what to add to their logits: minus infinity for forbidden ones.

        Args:
            generated: the generated tokens, `count` of them.
        """
        tail = generated[-self._longest :].tolist()
        forbidden = [
            last
            for *before, last in self._bad_words
            if not before or before == tail[-len(before) :]
        ]
        if count < self.params.min_tokens:
            forbidden += self._ends
        ids, values = self._bias
        return np.append(ids, np.array(forbidden, np.int64)), np.append(
            values, np.full(len(forbidden), -np.inf, np.float32)
        )


def _sequences(
    words: Iterable[str], vocab_size: int, encode: Callable[[str], list[int]] | None
) -> list[list[int]]:
    """The token sequences of words, at the beginning of a text and after a space."""
    found = []
    for word in words:
        if encode is None:
            raise InvalidRequest("bad_words need a tokenizer, and this model has no tokenizer")
        bare, spaced = (encode(space + word.lstrip(" ")) for space in ("", " "))
        if not bare:
            raise InvalidRequest(f"bad_words must have tokens, and {word!r} has none")
        found += [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
    return [ids for ids in found if ids and max(ids) < vocab_size]
