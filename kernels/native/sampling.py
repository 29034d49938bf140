"""Draws tokens from logits on a CPU, with no sort of a vocabulary and no noise for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixcache.kernels.native.library import kernel


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
_KINDS = {"top_p": "f8", "uniform": "f8", "temperature": "f4", "min_p": "f4", "top_k": "i4"}
_DRAW = np.dtype([*_KINDS.items()], align=True)  # as in sampling.h
GREEDY = Draw()
_GREEDY_ROW = np.array([GREEDY], _DRAW)


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, [R] int64, and the row's highest logit, [R] float32.

    Where the highest is not finite, the token means nothing. O(vocab) a row; of the likeliest,
    those that top_p leaves are sorted.

    Args:
        logits: [R, vocab] float32 on a CPU; rows need not be adjacent.

    Raises:
        ValueError: the arguments do not fit together.
    """
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_cpu or len(draws) != rows or not vocab:
        raise ValueError(f"{len(draws)} draws from {logits.dtype} {list(logits.shape)}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    greedy = all(draw is GREEDY for draw in draws)
    table = _GREEDY_ROW.repeat(rows) if greedy else np.array(draws, _DRAW)
    tokens, highest = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    kernel("sample")(
        *(logits.data_ptr(), logits.stride(0), rows, vocab, table.ctypes.data),
        *(tokens.data_ptr(), highest.data_ptr()),
    )
    return tokens, highest
