"""Chooses the next tokens from logits."""

from __future__ import annotations

import torch

from radixcache.runtime.sampling import SamplingParams


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
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if rows:
        noise = torch.stack(
            [torch.empty_like(logits[row]).exponential_(generator=generators[row]) for row in rows]
        )
        chosen = _draw(logits[rows], [params[row] for row in rows], noise)
        tokens[rows] = chosen
    return tokens


def _draw(logits: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor) -> torch.Tensor:
    """[R] tokens drawn from the filtered distributions; `noise` [R, vocab] is exponential.

    The largest of probability / noise is a draw from the probabilities (exponential races), so
    every row needs only its own noise, whatever the other rows are.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    vocab = logits.shape[-1]
    # Scaled in float64: a tiny temperature must not overflow, nor be 0 in float32.
    temperatures = column([max(p.temperature, 1e-30) for p in params])
    scaled = (logits.double() / temperatures).softmax(-1).float()
    probs, order = scaled.sort(dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    rank = torch.arange(vocab, device=logits.device)
    dropped = rank >= column([p.top_k if p.top_k > 0 else vocab for p in params])
    dropped |= before >= column([p.top_p for p in params])
    dropped |= probs < probs[:, :1] * column([p.min_p for p in params])
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
