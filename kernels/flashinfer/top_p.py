"""Filters by top_k and top_p with FlashInfer's kernels, which need no sort."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from radixcache.kernels.flashinfer.load import load_flashinfer
from radixcache.kernels.torch.top_p import Filter, filter_by_sort, limit
from radixcache.kernels.upload import send


def make_filter() -> Filter:
    """`ImportError` if FlashInfer is not installed."""
    return partial(_filter, load_flashinfer())


def probe(device: torch.device, found: Filter) -> None:
    """`RuntimeError` if it keeps other tokens than a sort."""
    probs = torch.linspace(-20, 0, 4096, device=device).softmax(-1).expand(2, -1).contiguous()
    limits = [9, 0], [1.0, 0.5]
    if not torch.equal(found(probs, *limits), filter_by_sort(probs, *limits)):
        raise RuntimeError("its kernels give wrong results")


def _filter(
    flashinfer: Any, probs: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """A `Filter` by thresholds; of equally likely tokens at the border, it keeps all.

    FlashInfer only selects the tokens: its renormalised values may be rounded differently in
    another batch.
    """
    kept, vocab = probs, probs.shape[1]
    if any(k > 0 for k in top_k):
        most = send([limit(k, vocab) for k in top_k], probs.device, torch.int32)
        found = flashinfer.top_k_renorm_probs(probs, most, is_deterministic=True)
        kept = kept.masked_fill(found == 0, 0)
    if any(p < 1 for p in top_p):
        mass = send(top_p, probs.device, probs.dtype)
        found = flashinfer.top_p_renorm_probs(probs, mass, is_deterministic=True)
        kept = kept.masked_fill((found == 0) & (mass < 1)[:, None], 0)
    return kept
