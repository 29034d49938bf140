"""Decides which prompts are in prefill at the same time.

A prompt that takes several steps shares them with others. Only a few such prompts run at a time, so
that each has a large share and the shortest end soon; and no sequence computes what one of them is
about to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import numpy as np

from radixcache.runtime.request import Sequence
from radixcache.tokens import Tokens

Match = Callable[[Tokens, Hashable], int]
"""The number of leading tokens that would not be computed."""


def is_coming(sequence: Sequence, prompts: Collection[Sequence], match: Match) -> bool:
    """Whether one of the `prompts` in prefill will soon compute most of what a sequence lacks."""
    namespace = sequence.request.namespace
    for other in prompts:
        middle = (other.num_computed + len(sequence)) // 2 + 1
        if middle <= len(other) and namespace == other.request.namespace:
            parts = sequence.tokens[:middle], other.tokens[:middle]
            if np.array_equal(*parts) and match(sequence.tokens, namespace) <= other.num_computed:
                return True
    return False


def may_begin(
    sequence: Sequence,
    prompts: Collection[Sequence],
    match: Match,
    room: Callable[[int], int] | None,
) -> bool:
    """Whether a sequence may begin beside `prompts` that go on after this step: if its own prefill
    ends in this step, or is less than half as long as what is left of each of them.

    Args:
        room: how many tokens after a given number the step can still take; None is no limit.
    """
    if is_coming(sequence, prompts, match):
        return False
    if room is None:
        return True
    hit = match(sequence.tokens, sequence.request.namespace)
    missing = len(sequence) - hit
    return missing <= room(hit) or 2 * missing < min(prompt.num_pending for prompt in prompts)
