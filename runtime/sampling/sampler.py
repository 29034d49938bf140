"""Chooses the next tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from radixcache.kernels.likeliest import KeepLikeliest, by_sort
from radixcache.kernels.upload import send
from radixcache.runtime.sampling.params import SamplingParams


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    generators: list[torch.Generator],
    keep_likeliest: KeepLikeliest = by_sort,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, [R] int64, and the row's highest logit, [R] float32.

    Both are on the logits' device, which nobody waits for. Where the highest is not finite, the
    token means nothing: none was left (-inf), or the logits are no numbers (NaN if one of them is).

    The largest of probability / noise is a draw from the probabilities (an exponential race), so
    every row needs only its own noise, whatever the other rows are.

    Args:
        logits: [R, vocab] float32.
        params: of each row.
        generators: each row's source of noise, on the logits' device; greedy rows use none.
        keep_likeliest: how top_k and top_p are done.
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
        logits[rows].masked_fill_(~finite, 0),  # a filter might search forever for what to keep
        [params[row] for row in drawn],
        keep_likeliest,
    )
    return tokens.index_copy_(0, rows, probs.div_(noise).argmax(-1)), highest


def _probabilities(
    logits: torch.Tensor, params: list[SamplingParams], keep_likeliest: KeepLikeliest
) -> torch.Tensor:
    """[R, vocab] in the place of `logits`, 0 for what is filtered out; no need to add up to 1."""
    # As float32 can hold them: by 0 or inf, some logits would become NaN.
    limited = [min(max(p.temperature, 1e-30), 1e38) for p in params]
    temperature = send(limited, logits.device, logits.dtype)
    # From the maximum down: a tiny temperature may make -inf of them, but nothing else.
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    probs = logits.softmax(-1)
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if not filtered:
        return probs
    rows, cut = send(filtered, logits.device), [params[i] for i in filtered]
    kept = some = probs[rows]
    if any(p.top_k > 0 or p.top_p < 1 for p in cut):
        kept = keep_likeliest(some, [p.top_k for p in cut], [p.top_p for p in cut])
    if any(p.min_p for p in cut):
        min_p = send([p.min_p for p in cut], logits.device, logits.dtype)[:, None]
        kept = kept.masked_fill(some < some.amax(-1, keepdim=True) * min_p, 0)
    return probs.index_copy_(0, rows, kept)


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row, its token and then the likeliest: [R, 1 + max(counts)] token ids, and their
    log-probabilities by the unmodified logits [R, vocab].

    The first `counts[row]` of the likeliest are those of the row; what follows says nothing.
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
