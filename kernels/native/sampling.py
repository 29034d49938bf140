"""Draws tokens from logits on a CPU, with no sort of a vocabulary and no noise for all of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.draw import GREEDY, Draw
from radixcache.kernels.native.library import kernel

_KINDS = {"top_p": "f8", "uniform": "f8", "temperature": "f4", "min_p": "f4", "top_k": "i4"}
_DRAW = np.dtype([*_KINDS.items()], align=True)  # as in sampling.h
_GREEDY_ROW = np.array([GREEDY], _DRAW)


def draw_table(draws: Sequence[Draw]) -> NDArray[np.void]:
    """[R] draws as the kernels read them."""
    greedy = all(draw is GREEDY for draw in draws)
    return _GREEDY_ROW.repeat(len(draws)) if greedy else np.array(draws, _DRAW)


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
    table = draw_table(draws)
    tokens, highest = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    kernel("sample")(
        *(logits.data_ptr(), logits.stride(0), rows, vocab, table.ctypes.data),
        *(tokens.data_ptr(), highest.data_ptr()),
    )
    return tokens, highest
