"""How tokens are drawn from logits: the numbers that a row's draw depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32
from typing import NamedTuple

import torch


class Draw(NamedTuple):
    """How the token of a row is drawn; as it stands, the first of the highest.

    Attributes:
        top_k: 0 for no limit; below 2^31.
        uniform: noise in [0, 1); equal noise draws the same token.
    """

    top_p: float = 1.0
    uniform: float = 0.0
    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0


DrawTokens = Callable[[torch.Tensor, Sequence[Draw]], tuple[torch.Tensor, torch.Tensor]]
GREEDY = Draw()


class MultiStep(NamedTuple):
    """How several steps of sequences that decode are run in one call (multi-step scheduling, as in
    vLLM 0.6): no Python runs between two.

    Attributes:
        draws: [B * S] of B sequences and S steps, those of a sequence behind each other.
        stops: tokens behind which no step follows.
        interrupt: no step begins while it is not 0; another thread may set it.
    """

    draws: Sequence[Draw]
    stops: Sequence[int]
    interrupt: c_int32
