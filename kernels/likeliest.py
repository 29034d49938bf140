"""Filters by top_k and top_p: with FlashInfer, which needs no sort, where it works; else sorted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from radixcache.errors import first_line
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.load_flashinfer import load_flashinfer
from radixcache.kernels.upload import send

_log = logging.getLogger("radixcache")

KeepLikeliest = Callable[[torch.Tensor, Sequence[int], Sequence[float]], torch.Tensor]
"""Sets probabilities [R, vocab] float32 to 0 for all but the `top_k[row]` likeliest tokens, and for
all behind the fewest likeliest ones whose sum reaches `top_p[row]`.
A top_k below 1 and a top_p of 1 drop nothing."""


def choose_filter(device: torch.device) -> KeepLikeliest:
    """FlashInfer's kernels on a GPU where they give right results, else a sort."""
    if device.type != "cuda":
        return by_sort
    keep, errors = first_that_runs(partial(_tried_flashinfer, device))
    if errors and not isinstance(errors[0], ImportError):
        reason = first_line(errors[0])
        _log.warning("top_k and top_p sort, which is slow on a GPU: FlashInfer: %s", reason)
    return keep or by_sort


def _tried_flashinfer(device: torch.device) -> KeepLikeliest:
    keep = partial(_by_flashinfer, load_flashinfer())
    probs = torch.linspace(-20, 0, 4096, device=device).softmax(-1).expand(2, -1).contiguous()
    if not torch.equal(keep(probs, [9, 0], [1.0, 0.5]), by_sort(probs, [9, 0], [1.0, 0.5])):
        raise RuntimeError("its kernels give wrong results")
    return keep


def by_sort(probs: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """`KeepLikeliest` on any device; it keeps as few equally likely tokens as possible."""
    vocab = probs.shape[1]
    limits = [(_limit(k, vocab), p if p < 1 else 2.0) for k, p in zip(top_k, top_p, strict=True)]
    most, mass = send(limits, probs.device, probs.dtype)[:, :, None].unbind(1)  # [R, 1] each
    ordered, order = probs.sort(dim=-1, descending=True)
    sums = ordered.cumsum(-1)
    # A share of the actual sum, which in float32 may be some 1e-5 off 1 in a large vocabulary.
    dropped = (torch.arange(vocab, device=probs.device) >= most) | (
        sums - ordered >= mass * sums[:, -1:]
    )
    dropped[:, 0] = False
    return torch.empty_like(probs).scatter_(-1, order, ordered.masked_fill_(dropped, 0))


def _by_flashinfer(
    flashinfer: Any, probs: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """`KeepLikeliest` by thresholds; of equally likely tokens at the border, it keeps all.

    FlashInfer only selects the tokens: its renormalised values may be rounded differently in
    another batch.
    """
    kept, vocab = probs, probs.shape[1]
    if any(k > 0 for k in top_k):
        most = send([_limit(k, vocab) for k in top_k], probs.device, torch.int32)
        found = flashinfer.top_k_renorm_probs(probs, most, is_deterministic=True)
        kept = kept.masked_fill(found == 0, 0)
    if any(p < 1 for p in top_p):
        mass = send(top_p, probs.device, probs.dtype)
        found = flashinfer.top_p_renorm_probs(probs, mass, is_deterministic=True)
        kept = kept.masked_fill((found == 0) & (mass < 1)[:, None], 0)
    return kept


def _limit(top_k: int, vocab: int) -> int:
    return min(top_k, vocab) if top_k > 0 else vocab
