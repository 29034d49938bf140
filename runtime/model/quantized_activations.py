"""Implements `quantized_activations`: rows in 8 bits before they meet a quantized weight.

It is a mode of a model, at all numbers of rows: a row is rounded by itself, in blocks of 32, so
that a hit has a miss's bits. The products of routers, those that MLA absorbs, and what is no
product stay as they are.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.native.library import DTYPES, problem
from radixcache.kernels.native.linear import rounding_is_fast, rounding_problem
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.selfcheck import PagedTexts

_log = logging.getLogger("radixcache")

AUTO = True
"""Whether "auto" is "on" where it pays; see docs/guide.md for what it changes and brings."""

MOST_ERROR = 0.25
"""Of logits, over their spread, beyond which a model is refused. Tokens at random give 0.06 to 0.07
in SmolLM2 and Gemma 3, a text half of that, a wrong kernel more than 1."""

_TOKENS = 12


def describe() -> str:
    """Whether rows in 8 bits are fast here, or why there are none."""
    reason = problem() or rounding_problem()
    return f"no: {reason}" if reason else "yes" if rounding_is_fast() else "yes, but not fast"


def check_activations(asked: str, device: torch.device, dtype: torch.dtype | str) -> None:
    """Refuse what no model can have here, before one is read.

    Raises:
        InvalidRequest: there is no such mode; or it is asked for, and this machine cannot.
    """
    if asked not in ("auto", "on", "off"):
        raise InvalidRequest(f"unknown quantized_activations {asked!r}: say auto, on or off")
    if asked == "on" and (reason := _refusal(device, dtype)) is not None:
        raise InvalidRequest(f"quantized_activations='on' {reason}: say off")


def quantize_activations(model: PagedModel, asked: str) -> None:
    """Let a loaded model round rows if that is asked for, or if it pays, and its logits stay close.

    Raises:
        InvalidRequest: it is asked for, and the model has no such products.
        ModelError: its logits change too much.
    """
    if asked == "off":
        return
    if model.rounds is None:  # as without the kernels
        if asked == "on":
            told = "needs quantized weights in our own loop, not FP8 or NF4"
            raise InvalidRequest(f"quantized_activations='on' {told}: say off")
        return
    in_float32 = model.exact and model.dtype == torch.float32
    pays = AUTO and rounding_is_fast() and rounding_problem() is None
    if asked == "auto" and (in_float32 or not pays):
        return
    plain, rounded = _logits(model, False), _logits(model, True)
    # The median: nearly tied experts may give some tokens another MLP.
    error = float(((rounded - plain).std(1) / plain.std(1)).median())
    if error <= MOST_ERROR:  # not if it is NaN
        return
    model.rounds.value = False
    told = f"its logits change by {error:.1%} of their spread ({MOST_ERROR:.0%} at most)"
    if asked == "on":
        raise ModelError(f"this model does not bear quantized_activations: {told}; say off")
    _log.info("activations stay as they are: %s", told)


def _refusal(device: torch.device, dtype: torch.dtype | str) -> str | None:
    if device.type != "cpu":
        return f"runs on a CPU only, not on {device}"
    if dtype not in DTYPES:
        return f"needs float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if (reason := problem() or rounding_problem()) is not None:
        return f"needs the native kernels, which do not run here ({reason})"
    return None


def _logits(model: PagedModel, rounded: bool) -> torch.Tensor:
    """[T, vocab_size] of some tokens."""
    assert model.rounds is not None
    model.rounds.value = rounded
    count = min(_TOKENS, model.max_context)
    tokens = np.arange(count) * 7919 % model.vocab_size
    return PagedTexts(model, [tokens.tolist()], _TOKENS).run({0: count})
