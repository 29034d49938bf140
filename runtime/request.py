"""A request and its sequences: what is asked, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from radixcache.base import Tokens
from radixcache.lease import Lease
from radixcache.runtime.detokenizer import Detokenizer
from radixcache.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from radixcache.runtime.sampling import SamplingParams

if TYPE_CHECKING:  # the index benchmark runs the scheduler without it
    import torch


class Sequence:
    """One completion of a request: its tokens, and a lease while it runs.

    The cache knows the first `lease.num_tokens` of them. It hears of decoded ones when the sequence
    leaves, so KV may be there for more: for `num_computed`, the step being scheduled included. The
    last sampled token has none yet.
    """

    def __init__(
        self, request: Request, index: int, max_tokens: int, generator: torch.Generator
    ) -> None:
        self.request = request
        self.index = index
        self.max_tokens = max_tokens
        self.generator = generator
        self.lease: Lease | None = None
        self.num_computed = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.passed_over = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, float]] = []
        self.detokenizer: Detokenizer | None = None
        self._tokens: Tokens = np.empty(len(request.prompt_token_ids) + max_tokens, np.int32)
        self._tokens[: len(request.prompt_token_ids)] = request.prompt_token_ids
        self._length = len(request.prompt_token_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def max_length(self) -> int:
        """Tokens that may get KV: all but the last generated one."""
        return len(self._tokens) - 1

    @property
    def tokens(self) -> Tokens:
        """[len] the prompt and what was generated; a view."""
        return self._tokens[: self._length]

    @property
    def pending(self) -> Tokens:
        """The tokens without KV; one of them while decoding."""
        return self._tokens[self.num_computed : self._length]

    @property
    def unpublished(self) -> Tokens:
        """The tokens with KV that the cache has not heard of; a view."""
        start = self.lease.num_tokens if self.lease else 0
        return self._tokens[start : self.num_computed]

    @property
    def generated(self) -> Tokens:
        """The generated tokens; a view."""
        return self._tokens[len(self.request.prompt_token_ids) : self._length]

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self._tokens[self._length] = token
        self._length += 1

    def output(self) -> CompletionOutput:
        """The state of this completion."""
        text, detokenizer = "", self.detokenizer
        if detokenizer is not None:
            text = detokenizer.take(finished=self.finish_reason is not None)
        return CompletionOutput(
            index=self.index,
            text=detokenizer.text if detokenizer else "",
            new_text=text,
            token_ids=self.generated.tolist(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.request.params.logprobs is None else self.logprobs,
        )


class Request:
    """A prompt, its parameters, and one sequence per completion."""

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: Tokens,
        params: SamplingParams,
        namespace: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.namespace = namespace
        self.sequences: list[Sequence] = []
        self.prefilled_tokens = 0
        self.error: str | None = None
        self._arrival = time.perf_counter()
        self._first_token: float | None = None
        self._end: float | None = None

    def add_sequences(
        self,
        max_tokens: int,
        decode: Callable[[list[int]], str] | None,
        make_generator: Callable[[int], torch.Generator],
    ) -> None:
        """Make the `n` sequences."""
        for index in range(self.params.n):
            sequence = Sequence(self, index, max_tokens, make_generator(index))
            if decode is not None:
                sequence.detokenizer = Detokenizer(decode, self.params.stop_strings)
            self.sequences.append(sequence)

    @property
    def finished(self) -> bool:
        """Whether every completion is."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def note_token(self) -> None:
        """Keep the time of the first token, and of the end if this was it."""
        if self._first_token is None:
            self._first_token = time.perf_counter()
        self.note_end()

    def note_end(self) -> None:
        """Keep the time of the end, once it has come."""
        if self.finished and self._end is None:
            self._end = time.perf_counter()

    def output(self) -> RequestOutput:
        """The state of the request."""
        end = self._end or time.perf_counter()
        ttft = rate = None
        if self._first_token is not None:
            ttft = self._first_token - self._arrival
            decoded = sum(len(s.generated) for s in self.sequences) - len(self.sequences)
            if decoded > 0 and end > self._first_token:
                rate = decoded / (end - self._first_token)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids.tolist(),
            outputs=[sequence.output() for sequence in self.sequences],
            num_cached_tokens=self.sequences[0].cached_tokens,
            metrics=RequestMetrics(
                prefilled_tokens=self.prefilled_tokens,
                ttft=ttft,
                latency=end - self._arrival,
                tokens_per_second=rate,
                preemptions=sum(sequence.preemptions for sequence in self.sequences),
            ),
            finished=self.finished,
            error=self.error,
        )
