"""Chooses the next tokens from logits."""

from __future__ import annotations

from itertools import groupby

import torch

from radixcache.kernels.upload import send
from radixcache.runtime.engine.sampling import SamplingParams


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    generators: list[torch.Generator],
) -> torch.Tensor:
    """One token for each row: [R] int64, on the logits' device, which nobody waits for.

    Args:
        logits: [R, vocab] float32.
        params: of each row.
        generators: each row's source of noise, on the logits' device; greedy rows use none.
    """
    tokens = logits.argmax(-1)
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if not drawn:
        return tokens
    rows = send(drawn, logits.device)
    noise = logits.new_empty(len(drawn), logits.shape[1])
    end = 0
    for generator, group in groupby(drawn, key=lambda row: generators[row]):
        start, end = end, end + len(list(group))
        noise[start:end].exponential_(generator=generator)
    return tokens.index_copy_(0, rows, _draw(logits[rows], [params[row] for row in drawn], noise))


def _draw(logits: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor) -> torch.Tensor:
    """[R] tokens drawn from the filtered distributions; `noise` [R, vocab] is exponential.

    The largest of probability / noise is a draw from the probabilities (exponential races), so
    every row needs only its own noise, whatever the other rows are.
    """
    vocab = logits.shape[-1]
    settings = [
        (max(p.temperature, 1e-30), p.top_k if p.top_k > 0 else vocab, p.top_p, p.min_p)
        for p in params
    ]
    table = send(settings, logits.device, torch.float64)
    temperature, top_k, top_p, min_p = table[:, :, None].unbind(1)  # [R, 1] each
    # Scaled in float64: a tiny temperature must not overflow, nor be 0 in float32.
    scaled = (logits.double() / temperature).softmax(-1).float()
    probs, order = scaled.sort(dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    rank = torch.arange(vocab, device=logits.device)
    dropped = (rank >= top_k) | (before >= top_p.float()) | (probs < probs[:, :1] * min_p.float())
    dropped[:, 0] = False
    winner = (probs.masked_fill(dropped, 0.0) / noise).argmax(-1, keepdim=True)
    return order.gather(-1, winner)[:, 0]


def top_logprobs(logits: torch.Tensor, token: int, count: int) -> dict[int, float]:
    """Log-probabilities of a token and the `count` likeliest, by the unmodified logits [vocab]."""
    logprobs = logits.log_softmax(-1)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    result = {token: float(logprobs[token])}
    result.update(zip(tokens.tolist(), values.tolist(), strict=True))
    return result
