"""Compares a model's logits over pages with those of transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixcache.errors import ModelError
from radixcache.runtime.model.compatibility import refusal
from radixcache.runtime.model.selfcheck import PagedTexts

if TYPE_CHECKING:
    from radixcache.runtime.model.fallback.model import TransformersModel

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
    lens = min(48, model.max_context), min(30, model.max_context)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length) for length in lens]
    expected = [model.stock_logits(tokens) for tokens in sequences]
    # A third is the first again, from its state in the middle of a chunk; not of other models.
    middle = min(22, lens[0] - 1)
    texts = PagedTexts(model, [*(tokens.tolist() for tokens in sequences), []], 4)
    done, worst = texts.done, 0.0
    for step in ((17, 0), (21, 11), (0, 12), (1, 1), (1, 1), (64, 64), (64, 0)):
        kept: tuple[tuple[int, int], ...] = ()
        if step == (64, 0) and model.state_shapes and middle > 17:
            done[0], texts.slot[0] = middle, texts.slot[2]
        elif done[0] == 17 < middle:
            kept = ((middle - 17, 2),)
        starts = [*done]
        counts = {i: min(step[i], lens[i] - done[i]) for i in (0, 1)}
        counts = {i: count for i, count in counts.items() if count}
        if not counts:
            continue
        got = texts.run(counts, keeps=kept)
        wanted = torch.cat([expected[i][starts[i] : done[i]] for i in counts])
        spread = wanted.max() - wanted.min()
        worst = max(worst, float(((got - wanted).abs().max() / spread).nan_to_num(torch.inf)))
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
