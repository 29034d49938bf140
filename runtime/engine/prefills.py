"""Which prompts are in prefill at the same time.

A prompt that does not end in one step leaves a part of the next ones to others. There are never
many of them, so that each has a large part and the shortest end soon; and nobody computes what one
of them is about to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import numpy as np

from radixcache.base import Tokens
from radixcache.runtime.request import Sequence

Match = Callable[[Tokens, Hashable], int]
"""How many leading tokens would not be computed."""


def is_coming(sequence: Sequence, prompts: Collection[Sequence], match: Match) -> bool:
    """Whether one of `prompts` in prefill is about to compute most of what a sequence lacks."""
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
    """Whether a sequence may begin beside `prompts` that are in prefill and do not end: if it ends
    in this step itself, or is less than half as long as what is left of each.

    Args:
        room: how many tokens behind so many the step can still take; None lets one of any size.
    """
    if is_coming(sequence, prompts, match):
        return False
    if room is None:
        return True
    hit = match(sequence.tokens, sequence.request.namespace)
    missing = len(sequence) - hit
    return missing <= room(hit) or 2 * missing < min(len(prompt.pending) for prompt in prompts)
