"""A request and its sequences: what is asked, and how far it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from radixcache.base import Tokens
from radixcache.lease import Lease
from radixcache.runtime.explanation import Loaded, Miss
from radixcache.runtime.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sampling.penalties import PenaltyState
from radixcache.runtime.tokens.conversation import thoughts_of
from radixcache.runtime.tokens.detokenizer import Detokenizer
from radixcache.runtime.tokens.stops import StopStrings
from radixcache.stored import Medium

if TYPE_CHECKING:  # the index benchmark runs the scheduler without torch
    from radixcache.runtime.sampling.grammar import Grammar
    from radixcache.runtime.sampling.prompt_logprobs import PromptLogprobs


PromptKey = tuple[Hashable, bytes]
"""A namespace, and a digest of a prompt in it."""

PHASES = ("queue", "prefill", "decode")
"""What a request goes through: until it is admitted, to its first token, and to its end."""


def prompt_key(tokens: Tokens, namespace: Hashable) -> PromptKey:
    """What stands for the prompt `tokens`: 256 bits of BLAKE2, which no other has. O(tokens)."""
    return namespace, blake2b(tokens.tobytes(), digest_size=32).digest()


class Sequence:
    """One completion of a request: its tokens, and a lease while it runs.

    The cache knows the first `lease.num_tokens` of them. It hears of decoded ones when the sequence
    leaves, so KV may be there for more: for `num_computed`, the step being scheduled included. The
    last sampled token has none yet.
    """

    def __init__(self, request: Request, index: int, max_tokens: int) -> None:
        self.request = request
        self.index = index
        self.max_tokens = max_tokens
        self.lease: Lease | None = None
        self.num_computed = 0
        self.prefill_end = 0
        """Tokens that it had when it was admitted: up to there it prefills, then it decodes."""
        self.cached_tokens = 0
        self.num_recomputed = 0
        """Prompt tokens whose KV was cached, but computed again for want of a recurrent state."""
        self.loaded: list[Loaded] = []
        """What came up from a tier below the pool."""
        self.preemptions = 0
        self.resumes = False
        """It was put back, and some of what it finds in the cache is its own."""
        self.num_skips = 0
        self.has_waited = False
        """It was left waiting for a step once, because it would hit more then."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, float]] = []
        self.detokenizer: Detokenizer | None = None
        self.scoring: PromptLogprobs | None = None
        """The prompt's log-probabilities, as long as this sequence has some to compute."""
        self.grammar: Grammar | None = None
        self.num_first = 0
        """Tokens that its first step gave it."""
        self.num_drafted: Counter[str] = Counter()
        """Tokens, by source."""
        self.num_accepted: Counter[str] = Counter()
        """Of these, those that were drawn, too."""
        self._num_taken = 0
        self._end_taken = False
        self._tokens: Tokens = np.empty(len(request.prompt_token_ids) + max_tokens, np.int32)
        self._tokens[: len(request.prompt_token_ids)] = request.prompt_token_ids
        self._length = len(request.prompt_token_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def num_loaded(self) -> int:
        """Tokens that came up from a tier below the pool."""
        return sum(len(part) for part in self.loaded)

    @property
    def is_fresh(self) -> bool:
        """Whether the prompt is all there is, and nothing is generated."""
        return self._length == len(self.request.prompt_token_ids)

    @property
    def max_length(self) -> int:
        """Tokens that may get KV: the prompt, and all but the last generated one."""
        return max(len(self.request.prompt_token_ids), len(self._tokens) - 1)

    @property
    def token_cost(self) -> int:
        """What each token that is computed takes of the step's token budget."""
        return 1 if self.scoring is None else self.scoring.token_cost

    @property
    def tokens(self) -> Tokens:
        """[len] the prompt and what was generated; a view."""
        return self._tokens[: self._length]

    @property
    def in_prefill(self) -> bool:
        """Whether it has KV for less than it had when it was admitted."""
        return self.num_computed < self.prefill_end

    @property
    def pending(self) -> Tokens:
        """The tokens without KV; while decoding the last one, and before it those that a grammar
        has forced."""
        return self._tokens[self.num_computed : self._length]

    @property
    def unpublished(self) -> Tokens:
        """The tokens with KV that the cache has not heard of; a view. A step that is launched ahead
        counts one more in `num_computed`, which never comes if the sequence fails before it."""
        start = self.lease.num_tokens if self.lease else 0
        return self.tokens[start : self.num_computed]

    @property
    def generated(self) -> Tokens:
        """The generated tokens; a view."""
        return self._tokens[len(self.request.prompt_token_ids) : self._length]

    def note_load(self, medium: Medium, start: int, end: int, seconds: float) -> None:
        """Tokens [start, end) came up from a tier below the pool."""
        if self.resumes:
            return
        before = [part for part in self.loaded if part.start < start]
        if before and before[-1].medium == medium:  # its end may have been evicted again
            last = before.pop()
            start, seconds = last.start, last.seconds + seconds
        self.loaded = [*before, Loaded(medium, start, end, seconds)]

    def append(self, token: int, logprobs: dict[int, float] | None = None) -> None:
        """Add a sampled token, all of it or nothing."""
        self._tokens[self._length] = token
        if logprobs is not None:
            self.logprobs[len(self.generated) :] = [logprobs]
        self._length += 1

    def output(self) -> CompletionOutput:
        """The state of this completion."""
        new_text = self._take_text()
        text = self.detokenizer.shown if self.detokenizer else ""
        return CompletionOutput(**vars(self._since(0, text)), new_text=new_text)

    @property
    def has_delta(self) -> bool:
        """Whether tokens or the end have come since the last `take_delta`."""
        ended = self.finish_reason is not None and not self._end_taken
        return ended or self._num_taken < len(self.generated)

    def take_delta(self) -> Delta:
        """What came since the last call: O(new tokens), where `output` is O(all)."""
        start, self._num_taken = self._num_taken, len(self.generated)
        self._end_taken = self.finish_reason is not None
        return self._since(start, self._take_text())

    def _take_text(self) -> str:
        return self.detokenizer.take(self.finish_reason is not None) if self.detokenizer else ""

    def _since(self, start: int, text: str) -> Delta:
        return Delta(
            index=self.index,
            text=text,
            token_ids=self.generated[start:].tolist(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.request.params.logprobs is None else self.logprobs[start:],
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
        client: Hashable = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.namespace = namespace
        self.client = client
        """Whose it is: clients share the engine fairly."""
        self.sequences: list[Sequence] = []
        self.prefilled_tokens = 0
        self.prompt_logprobs: list[dict[int, float] | None] | None = None
        self.explanation: list[Miss] | None = None
        """Why the first admitted sequence was not cached in full; None before it is known."""
        self.error: str | None = None
        self.error_is_invalid = False
        """Whether the error is due to what was asked for."""
        self.penalties: PenaltyState | None = None
        """What is changed in its logits; None if nothing is."""
        self.arrived = time.perf_counter()
        """This and the next three are of `time.perf_counter`; what has not come is None."""
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None

    def add_sequences(self, max_tokens: int, decode: Callable[..., str] | None) -> None:
        """Make the `n` sequences."""
        params, stop_strings, opening = self.params, StopStrings(self.params.stop_strings), ""
        if decode is not None and stop_strings:
            opening = thoughts_of(decode(self.prompt_token_ids[-8:].tolist()))
        if decode is not None and not params.skip_special_tokens:
            decode = partial(decode, special=True)
        for index in range(params.n):
            sequence = Sequence(self, index, max_tokens)
            if decode is not None:
                sequence.detokenizer = Detokenizer(
                    decode,
                    stop_strings,
                    params.min_tokens,
                    params.include_stop_str_in_output,
                    opening,
                )
            self.sequences.append(sequence)

    @cached_property
    def prompt_key(self) -> PromptKey:
        """By which the logits at the end of the prompt are kept."""
        return prompt_key(self.prompt_token_ids, self.namespace)

    @property
    def finished(self) -> bool:
        """Whether every completion is."""
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end, or to now."""
        return (self.ended or time.perf_counter()) - self.arrived

    @property
    def phases(self) -> list[tuple[str, float, float | None]]:
        """What has begun of "queue", "prefill" and "decode", from when, and until when."""
        marks = (self.arrived, self.admitted, self.first_token, self.ended)
        return [
            (name, start, end)
            for name, start, end in zip(PHASES, marks, marks[1:], strict=False)
            if start is not None
        ]

    def note_admission(self) -> None:
        """Keep the time at which the first completion began to run."""
        if self.admitted is None:
            self.admitted = time.perf_counter()

    def note_token(self) -> None:
        """Keep the time of the first token, and of the end if this was it."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.note_end()

    def note_end(self) -> None:
        """Keep the time of the end, once it has come."""
        if self.finished and self.ended is None:
            self.ended = time.perf_counter()

    def output(self) -> RequestOutput:
        """The state of the request."""
        ttft, latency, rate = self.ttft, self.latency, None
        if ttft is not None:
            decoded = sum(len(s.generated) - s.num_first for s in self.sequences)
            if decoded > 0 and latency > ttft:
                rate = decoded / (latency - ttft)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids.tolist(),
            outputs=[sequence.output() for sequence in self.sequences],
            num_cached_tokens=self.sequences[0].cached_tokens,
            metrics=RequestMetrics(
                prefilled_tokens=self.prefilled_tokens,
                ttft=ttft,
                latency=latency,
                tokens_per_second=rate,
                preemptions=sum(sequence.preemptions for sequence in self.sequences),
                loaded_tokens=self.sequences[0].num_loaded,
                load_seconds=sum(part.seconds for part in self.sequences[0].loaded),
                drafted_tokens=dict(sum((s.num_drafted for s in self.sequences), Counter())),
                accepted_tokens=dict(sum((s.num_accepted for s in self.sequences), Counter())),
            ),
            finished=self.finished,
            error=self.error,
            prompt_logprobs=self.prompt_logprobs,
        )
