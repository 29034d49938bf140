"""Compares a model's logits over pages with those of transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixcache.errors import ModelError
from radixcache.kernels.attention import PagedBatch
from radixcache.runtime.model.compatibility import refusal
from radixcache.states import SequenceStates

if TYPE_CHECKING:
    from radixcache.runtime.model.transformers_model import TransformersModel

_MOST_ROUNDING = 0.25
"""The largest error of logits in 16 bits, as a share of their range, if those in float32 are right;
beyond, the model needs another dtype."""


def check_logits(model: TransformersModel, again: Callable[[], object] | None = None) -> None:
    """Refuse a model whose logits over pages differ from those of transformers' attention.

    Two short random sequences run in chunks, together and alone, then token by token. For a
    recurrent model, a state of the first is kept in the middle of a chunk and continued from.

    Args:
        again: loads and checks the model in float32; its result decides where logits in 16 bits
            are off by no more than deep models round.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    page_size, lens = 4, (min(48, model.max_context), min(30, model.max_context))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length) for length in lens]
    pages = np.array_split(rng.permutation(24).astype(np.int32), [14])
    pool = model.allocate(24, page_size, 4)
    expected = [model.stock_logits(tokens) for tokens in sequences]
    done, worst, middle = [0, 0], 0.0, min(22, lens[0] - 1)
    for step in ((17, 0), (21, 11), (0, 12), (1, 1), (1, 1), (64, 64), (64, 0)):
        again_from = step == (64, 0) and model.state_shapes and middle > 17
        done = [middle, lens[1]] if again_from else done
        ends = [min(d + n, length) for d, n, length in zip(done, step, lens, strict=True)]
        runs = [i for i in (0, 1) if ends[i] > done[i]]
        if not runs:
            continue
        counts = [ends[i] - done[i] for i in runs]
        batch = PagedBatch.of([pages[i] for i in runs], counts, [ends[i] for i in runs], page_size)
        tokens = np.concatenate([sequences[i][done[i] : ends[i]] for i in runs])
        states = [
            SequenceStates(
                3 if again_from else i if done[i] else -1,
                i,
                ((middle - 17, 3),) if i == 0 and done[0] == 17 and middle > 17 else (),
            )
            for i in runs
        ]
        got = model.forward(tokens, batch, np.arange(len(tokens)), pool, states)
        wanted = torch.cat([expected[i][done[i] : ends[i]] for i in runs])
        spread = wanted.max() - wanted.min()
        worst = max(worst, float(((got - wanted).abs().max() / spread).nan_to_num(torch.inf)))
        done = ends
    in_float32 = model.dtype == torch.float32
    if worst <= (1e-3 if in_float32 else 5e-2):
        return
    hint = "" if in_float32 else "; float32 tells if it is rounding"
    refused = refusal(
        model.model_type, f"its logits come out wrong there (by {worst:.1%} of their range{hint})"
    )
    if in_float32 or again is None or worst > _MOST_ROUNDING:
        raise refused
    try:
        again()
    except ModelError:
        raise refused from None
