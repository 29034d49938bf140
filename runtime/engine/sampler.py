"""Samples the tokens of a step on the device: logits processors, grammars, then the draw."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from radixcache.kernels.choose import choose_draw, choose_filter
from radixcache.kernels.draw import GREEDY, Draw
from radixcache.kernels.torch.top_p import Filter, filter_by_sort
from radixcache.kernels.upload import Fetch, on_device, send
from radixcache.runtime.engine.logits_processors import LogitsProcessors
from radixcache.runtime.engine.rows import Row, by_sequence
from radixcache.runtime.request import Sequence
from radixcache.runtime.sampling.grammar import mask
from radixcache.runtime.sampling.params import SamplingParams


class PendingStep(NamedTuple):
    """A step that is enqueued on the device, and the rows from which tokens are drawn."""

    rows: list[Row]
    tokens: torch.Tensor
    asking: list[int]  # rows whose log-probabilities are reported
    fetched: Fetch
    """The tokens; the highest logit of each row, not finite where no token could be chosen; and the
    token ids and log-probabilities of the rows that ask for them, if any does."""
    pools: Collection[Sequence] = ()
    """The sequences that end with their row, whose rows are `pooled`."""
    pooled: Fetch | None = None


class Sampler:
    """Runs logits processors, grammars and the draw.

    Args:
        seed: seeds the noise of requests without a seed of their own.
        eos_token_ids: forbidden by grammars where a request ignores them.
    """

    def __init__(self, device: torch.device, seed: int, eos_token_ids: Iterable[int]) -> None:
        self._processors = LogitsProcessors()
        self._generator = torch.Generator(device).manual_seed(seed)
        self._seeded: list[torch.Generator] = []
        """Generators for the rows that have a seed of their own."""
        self._eos_token_ids = tuple(eos_token_ids)
        with on_device(device):
            self._top_p_filter, self._draw = choose_filter(device), choose_draw(device)

    def forget(self) -> None:
        """Forget the state of all sequences: a step was cut off."""
        self._processors.forget()

    def sample(self, rows: list[Row], logits: torch.Tensor) -> PendingStep:
        """Draw a token from each row of `logits` [R, vocab], with the row's own noise.

        Args:
            rows: those of a sequence follow each other, each with one drafted token more.
        """
        params = [row.sequence.request.params for row in rows]
        edited = self._masked(rows, self._processors.edit(rows, logits))
        if self._draw is not None:
            tokens, highest = self._draw(edited, self.draws(rows))
        else:
            generators = self._generators(rows, params)
            tokens, highest = sample(edited, params, generators, self._top_p_filter)
        counts = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        top: tuple[torch.Tensor, ...] = ()
        if counts:
            asking = send([*counts], logits.device)
            top = top_logprobs(logits[asking], tokens[asking], [*counts.values()])
        return PendingStep(rows, tokens, [*counts], Fetch(tokens, highest, *top))

    def draws(self, rows: list[Row]) -> list[Draw]:
        """How the native kernel draws the tokens of these rows. The noise follows from the
        request, or its seed, and the token's place: whatever else is in the step, and however many
        steps a call runs, the draw is the same."""
        params = [row.sequence.request.params for row in rows]
        return [
            GREEDY if p.temperature <= 0 else draw_of(p, (self._seed(row) >> 11) / 2**53)
            for row, p in zip(rows, params, strict=True)
        ]

    def _seed(self, row: Row) -> int:
        """64 bits of noise for the row's draw."""
        request, index = row.sequence.request, row.sequence.index
        source = f"{self._generator.initial_seed()} {request.request_id} {index}"
        if request.params.seed is not None:
            source = f"{request.params.seed + index}"
        place = f"{source} {row.position}".encode()
        return int.from_bytes(blake2b(place, digest_size=8).digest(), "little")

    def _generators(self, rows: list[Row], params: list[SamplingParams]) -> list[torch.Generator]:
        """Each row's generator: with a seed, it follows from the token's place, so that the draw is
        the same after a failed step and with any draft."""
        generators = [self._generator] * len(rows)
        seeded = [at for at, p in enumerate(params) if p.seed is not None and p.temperature > 0]
        while len(self._seeded) < len(seeded):
            self._seeded.append(torch.Generator(self._generator.device))
        for at, generator in zip(seeded, self._seeded, strict=False):
            generators[at] = generator.manual_seed(self._seed(rows[at]))
        return generators

    def _masked(self, rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
        """`logits` with the tokens that grammars forbid at -inf: a copy if any row has one."""
        at, bits, forbidden = [], [], []
        for sequence, places in by_sequence(rows).items():
            if sequence.grammar is None:
                continue
            masks = np.empty((len(places), -(-logits.shape[1] // 32)), np.int32)
            draft = rows[places[-1]].draft
            if sequence.grammar.fill_masks(sequence.generated, draft, masks):
                ignores_eos = sequence.request.params.ignore_eos
                at += places
                bits.append(masks)
                forbidden += [self._eos_token_ids if ignores_eos else ()] * len(places)
        return mask(logits, at, np.concatenate(bits), forbidden) if at else logits


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    generators: list[torch.Generator],
    top_p_filter: Filter = filter_by_sort,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, [R] int64, and the row's highest logit, [R] float32.

    Both stay on the logits' device, without waiting. Where the highest is not finite, the token
    means nothing: none was left (-inf), or some logits are not numbers (NaN).

    Every row needs only its own noise, whatever the other rows are: the largest of probability /
    noise is a draw from the probabilities (an exponential race).

    Args:
        logits: [R, vocab] float32.
        params: one for each row.
        generators: each row's source of noise, on the logits' device; greedy rows use none.
        top_p_filter: applies top_k and top_p.
    """
    tokens = logits.argmax(-1)
    highest = logits.gather(-1, tokens[:, None])[:, 0]
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if not drawn:
        return tokens, highest
    rows = send(drawn, logits.device)
    noise = logits.new_empty(len(drawn), logits.shape[1])
    end = 0
    for generator, group in groupby(drawn, key=lambda row: generators[row]):
        start, end = end, end + len(list(group))
        noise[start:end].exponential_(generator=generator)
    finite = highest[rows, None].isfinite()
    probs = _probabilities(
        logits[rows].masked_fill_(~finite, 0),  # a filter might search forever
        [params[row] for row in drawn],
        top_p_filter,
    )
    return tokens.index_copy_(0, rows, probs.div_(noise).argmax(-1)), highest


def _temperature(params: SamplingParams) -> float:
    """As float32 can hold it: by 0 or inf, some logits would become NaN."""
    return min(max(params.temperature, 1e-30), 1e38)


def draw_of(params: SamplingParams, uniform: float) -> Draw:
    """How a kernel draws a token with noise in [0, 1)."""
    if params.temperature <= 0:
        return GREEDY
    top_k = min(max(params.top_k, 0), 2**31 - 1)
    return Draw(params.top_p, uniform, _temperature(params), params.min_p, top_k)


def _probabilities(
    logits: torch.Tensor, params: list[SamplingParams], top_p_filter: Filter
) -> torch.Tensor:
    """[R, vocab] weights in the place of `logits`: 0 if filtered out; they need not add up to 1."""
    temperature = send([*map(_temperature, params)], logits.device, logits.dtype)
    # From the maximum down: a tiny temperature may make -inf of them, but nothing else.
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    probs = logits.softmax(-1)
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if not filtered:
        return probs
    rows, cut = send(filtered, logits.device), [params[i] for i in filtered]
    kept = some = probs[rows]
    if any(p.top_k > 0 or p.top_p < 1 for p in cut):
        kept = top_p_filter(some, [p.top_k for p in cut], [p.top_p for p in cut])
    if any(p.min_p for p in cut):
        min_p = send([p.min_p for p in cut], logits.device, logits.dtype)[:, None]
        kept = kept.masked_fill(some < some.amax(-1, keepdim=True) * min_p, 0)
    return probs.index_copy_(0, rows, kept)


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's token, then its likeliest: [R, 1 + max(counts)] token ids, and their
    log-probabilities by the unmodified logits [R, vocab].

    Only the first `counts[row]` of the likeliest are meaningful.
    """
    logprobs = logits.log_softmax(-1)
    limits = [min(count, logits.shape[-1]) for count in counts]
    values, likeliest = logprobs.topk(max(limits))
    for count in {*limits} - {max(limits)}:  # which of equal ones comes first depends on the count
        rows = send([row for row, limit in enumerate(limits) if limit == count], logits.device)
        values[rows, :count], likeliest[rows, :count] = logprobs[rows].topk(count)
    chosen = tokens[:, None]
    values = torch.cat([logprobs.gather(-1, chosen), values], 1)
    return torch.cat([chosen, likeliest], 1), values
