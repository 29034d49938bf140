"""Chooses the tokens of a step, on the device."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import torch

from radixcache.kernels.likeliest import choose_filter
from radixcache.kernels.upload import Fetch, on_device, send
from radixcache.runtime.engine.logits_processors import LogitsProcessors
from radixcache.runtime.engine.request import Sequence
from radixcache.runtime.sampling.grammar import mask
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sampling.sampler import sample, top_logprobs


class PendingStep(NamedTuple):
    """A step that is enqueued on the device, and the sequences that get a token from it."""

    sequences: list[Sequence]
    tokens: torch.Tensor
    asking: list[int]  # rows whose log-probabilities are reported
    fetched: Fetch
    """The tokens; the highest logit of each row, not finite where no token could be chosen; and if
    any row asks, the token ids and log-probabilities of those that do."""


class Sampler:
    """Logits processors, then grammars, then the sampling itself.

    Args:
        seed: of the noise for requests without a seed of their own.
        eos_token_ids: what grammars forbid where a request ignores them.
    """

    def __init__(self, device: torch.device, seed: int, eos_token_ids: Iterable[int]) -> None:
        self._processors = LogitsProcessors()
        self._generator = torch.Generator(device).manual_seed(seed)
        self._eos_token_ids = tuple(eos_token_ids)
        with on_device(device):
            self._keep_likeliest = choose_filter(device)

    def forget(self) -> None:
        """What is known of the sequences of a step that was cut off."""
        self._processors.forget()

    def generator(self, params: SamplingParams) -> torch.Generator:
        """Of the noise of a sequence: its own if the request has a seed."""
        if params.seed is None:
            return self._generator
        return torch.Generator(self._generator.device)

    def sample(
        self, sequences: list[Sequence], logits: torch.Tensor, latest: torch.Tensor | None = None
    ) -> PendingStep:
        """Choose a token for each row; `latest` [R] are those before, if only the device knows."""
        params = [sequence.request.params for sequence in sequences]
        for sequence, one in zip(sequences, params, strict=True):
            if one.seed is not None and one.temperature > 0:
                # By the token's place, so that it is drawn alike after a step that failed.
                place = f"{one.seed + sequence.index} {sequence.num_computed}".encode()
                noise = int.from_bytes(blake2b(place, digest_size=8).digest(), "little")
                sequence.generator.manual_seed(noise)
        generators = [sequence.generator for sequence in sequences]
        edited = self._masked(sequences, self._processors.edit(sequences, logits, latest))
        tokens, highest = sample(edited, params, generators, self._keep_likeliest)
        counts = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        top: tuple[torch.Tensor, ...] = ()
        if counts:
            rows = send([*counts], logits.device)
            top = top_logprobs(logits[rows], tokens[rows], [*counts.values()])
        return PendingStep(sequences, tokens, [*counts], Fetch(tokens, highest, *top))

    def _masked(self, sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        """`logits` without what grammars forbid: a copy, or itself if no row has a grammar."""
        rows, forbidden = [], []
        for row, sequence in enumerate(sequences):
            grammar = sequence.grammar
            matcher = None if grammar is None else grammar.follow(sequence.generated)
            if matcher is not None:
                ignores_eos = sequence.request.params.ignore_eos
                rows.append((row, matcher))
                forbidden.append(self._eos_token_ids if ignores_eos else ())
        return mask(logits, rows, forbidden) if rows else logits
