"""Filters by top_k and top_p with a sort, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from radixcache.kernels.upload import send

Filter = Callable[[torch.Tensor, Sequence[int], Sequence[float]], torch.Tensor]
"""Sets probabilities [R, vocab] float32 to 0 for all but the `top_k[row]` likeliest tokens, and for
all behind the fewest likeliest ones whose sum reaches `top_p[row]`.
A top_k below 1 and a top_p of 1 drop nothing."""


def filter_by_sort(
    probs: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """A `Filter` that keeps as few equally likely tokens as possible."""
    vocab = probs.shape[1]
    limits = [(limit(k, vocab), p if p < 1 else 2.0) for k, p in zip(top_k, top_p, strict=True)]
    most, mass = send(limits, probs.device, probs.dtype)[:, :, None].unbind(1)  # [R, 1] each
    ordered, order = probs.sort(dim=-1, descending=True)
    sums = ordered.cumsum(-1)
    # A share of the actual sum, which in float32 may be some 1e-5 off 1 in a large vocabulary.
    dropped = (torch.arange(vocab, device=probs.device) >= most) | (
        sums - ordered >= mass * sums[:, -1:]
    )
    dropped[:, 0] = False
    return torch.empty_like(probs).scatter_(-1, order, ordered.masked_fill_(dropped, 0))


def limit(top_k: int, vocab: int) -> int:
    """The most tokens that a top_k leaves."""
    return min(top_k, vocab) if top_k > 0 else vocab
