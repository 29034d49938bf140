"""The outputs of a request: completions, deltas and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixcache.tokens import Tokens

MIN_REPEATS = 4
MIN_REPEATED = 48
"""Tokens: lists and tables repeat themselves, too."""
MAX_PERIOD = 256


@dataclass(frozen=True)
class RequestMetrics:
    """The time and the tokens of a request. Times in seconds.

    Attributes:
        prefilled_tokens: prompt tokens that were computed, over all `n` completions, those computed
            again after a preemption included.
        ttft: from arrival to the first token of the first completion; None before it.
        latency: from arrival to now, or to the end once finished.
        tokens_per_second: tokens after those of the first step over the time since then.
        preemptions: how often a completion was preempted for lack of pages.
        loaded_tokens: tokens of the first completion loaded from a tier below the KV pool.
        load_seconds: how long the request waited for that.
        drafted_tokens: tokens drafted over all completions, by source: "tree" or "suffix".
        accepted_tokens: drafted tokens that were accepted: each saved a step.
    """

    prefilled_tokens: int
    ttft: float | None
    latency: float
    tokens_per_second: float | None
    preemptions: int
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    drafted_tokens: dict[str, int] = field(default_factory=dict)
    accepted_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """The part of a completion that is new since its last delta; see `CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, float]] | None


@dataclass(frozen=True)
class CompletionOutput(Delta):
    """One completion of a prompt.

    Attributes:
        text: everything so far, without special tokens and stop strings.
        token_ids: every generated token, an end token included.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the string or token id that stopped it, None for the model's end token.
        logprobs: for each token, the log-probabilities asked for.
        new_text: what `text` gained since the last output of the same stream.
    """

    new_text: str

    @property
    def repetition(self) -> int | None:
        """The length of the stretch that it repeats at its end, if it does."""
        return find_repetition(self.token_ids)


def find_repetition(tokens: Sequence[int] | Tokens) -> int | None:
    """The length of a stretch that `tokens` end with at least `MIN_REPEATS` times, over at least
    `MIN_REPEATED` tokens; the shortest. O(n * MAX_PERIOD) at most, O(n) as a rule."""
    ids = np.asarray(tokens[-MAX_PERIOD * MIN_REPEATS :])
    for period in range(1, len(ids) // MIN_REPEATS + 1):
        length = max(period * MIN_REPEATS, MIN_REPEATED)
        if length <= len(ids) and ids[-1] == ids[-1 - period]:
            tail = ids[-length:]
            if np.array_equal(tail[period:], tail[:-period]):
                return period
    return None


@dataclass(frozen=True)
class RequestOutput:
    """A request's state: final from `generate` and `chat`, running from `stream`.

    Attributes:
        num_cached_tokens: leading prompt tokens whose KV the cache held when the request was first
            scheduled, or came to hold before they were computed. With `prompt_logprobs`, those of
            them that were not computed again for their logits.
        error: why the request failed, if it did.
        prompt_logprobs: for each prompt token the log-probabilities asked for, by token id, its
            own first; None for the first token. None as a whole until all are known, or if none
            were asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool
    error: str | None = field(default=None)
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass(frozen=True)
class PooledOutput:
    """What a text's last row became.

    Attributes:
        num_tokens: of the text, as the model reads it.
        num_cached_tokens: those of them that were not computed; all, if the row was kept.
        prefilled_tokens: those that were computed, again after a preemption included.
    """

    num_tokens: int
    num_cached_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True)
class EmbeddingOutput(PooledOutput):
    """A text's vector, [dimensions] float32."""

    embedding: NDArray[np.float32]


@dataclass(frozen=True)
class ScoringOutput(PooledOutput):
    """How well a document fits a query, from 0 to 1."""

    score: float
