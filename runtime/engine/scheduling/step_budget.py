"""How many prompt tokens one step may compute, by the time that they take.

All other requests wait for the end of a step. So while others run or wait, a step takes as many
tokens as a quarter of a second allows; a prompt that is alone, twice as many, so that a new request
waits no longer than that. The time of a token is measured by how many are before it: attention over
16,000 tokens may take several times as long as all else (SmolLM2-135M on two cores: 0.7 ms a token
at first, 4.6 ms behind 18,000).
"""

from __future__ import annotations

from collections.abc import Sequence

STEP_SECONDS = 0.25
"""The aim for a step while others run or wait."""

_ALONE = 2
"""A step may take so many times as long, and as many tokens at least, for a prompt alone."""

_FEWEST = 64
"""The fewest tokens of a step: in steps of 32 each took a quarter longer, of 64 a tenth."""

_FIRST = 256
"""Tokens of a step before any was measured."""

_DEEPER = 1.4
"""Until it is measured, a token takes so many times as long with twice as many before it."""

_SHALLOW = 512
"""The time of a token does not depend on fewer tokens before it."""


class StepBudget:
    """Counts what is left for the step that is being scheduled, and measures steps.

    Args:
        aim: seconds of a step while others run or wait; None does not limit time.

    Attributes:
        tokens: left in this step, of all kinds.
    """

    def __init__(self, aim: float | None = None) -> None:
        self.aim, self.tokens = aim, 0
        self._seconds = self._tokens = 0.0
        """The time left for prompt tokens, and the tokens allowed even if they take longer."""
        self._measured: dict[int, float] = {}
        """Seconds of a token, by the bit length of the number of tokens before it."""
        self._is_warm = False

    def begin(self, tokens: int, *, alone: bool) -> None:
        """Begin a step of at most `tokens`; `alone` if only one request is open."""
        times = _ALONE if alone else 1
        self.tokens, self._tokens = max(0, tokens), _FEWEST * times if self._measured else _FIRST
        self._seconds = (self.aim or 0.0) * times

    def room(self, position: int, parts: int = 1) -> int:
        """How many prompt tokens from `position` on fit into one of `parts` equal shares."""
        if self.aim is None:
            room = self.tokens
        else:
            seconds = self._token_seconds(position)
            room = int(max(self._tokens, self._seconds / seconds if seconds else 0))
        return min(self.tokens, -(-min(room, self.tokens) // parts))

    def spend(self, tokens: int, position: int | None = None) -> None:
        """Take `tokens` from the budget: prompt tokens if they have a `position`."""
        self.tokens = max(0, self.tokens - tokens)
        if position is not None:
            self._tokens = max(0.0, self._tokens - tokens)
            self._seconds = max(0.0, self._seconds - tokens * self._token_seconds(position))

    def note(self, prefills: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed (position, tokens) of prompts in `seconds`. The first is
        not counted: libraries load their kernels in it."""
        total = sum(count for _, count in prefills)
        if not self._is_warm or not total:
            self._is_warm |= bool(total)
            return
        known = {*self._measured}
        before = [self._token_seconds(position) for position, _ in prefills]
        expected = sum(s * count for s, (_, count) in zip(before, prefills, strict=True))
        for each, (position, count) in zip(before, prefills, strict=True):
            depth = _depth(position)
            now = each * seconds / expected if expected else seconds / total
            if depth in known:  # a step may have been held up by anything
                weight = count / (count + 128)
                now = each + weight * (min(now, 2 * each) - each)
            self._measured[depth] = now

    def _token_seconds(self, position: int) -> float:
        depth = _depth(position)
        if not self._measured:
            return 0.0
        near = depth
        if depth not in self._measured:
            near = min(self._measured, key=lambda known: abs(known - depth))
        return self._measured[near] * float(_DEEPER ** max(0, depth - near))


def _depth(position: int) -> int:
    return max(position, _SHALLOW).bit_length()
