"""How much of prompts one step may compute: tokens, and the time that they take.

Everybody else waits for the end of a step. So while others run or wait, a step takes as many tokens
as were computed in a quarter of a second; a prompt that is alone, twice as many: who comes then
waits for no more. What a token takes is measured, by how many are before it: attention over 16,000
of them may take several times as long as all else (SmolLM2-135M on two cores: 0.7 ms a token at
first, 4.6 ms behind 18,000).
"""

from __future__ import annotations

from collections.abc import Sequence

STEP_SECONDS = 0.25
"""Aimed at for a step while others run or wait."""

_ALONE = 2
"""Times as long, and with times as many tokens at least, if there is no other."""

_FEWEST = 64
"""Tokens of a step at least: in 32 each took a quarter longer, in 64 a tenth (the same machine)."""

_FIRST = 256
"""Tokens of a step before any was measured."""

_DEEPER = 1.4
"""Times as long may a token take with twice as many before it, until that is measured."""

_SHALLOW = 512
"""Tokens before a token that do not matter."""


class StepBudget:
    """What the step that is being scheduled may still take, and what steps have taken.

    Args:
        aim: seconds of a step while others run or wait; None if time does not matter.

    Attributes:
        tokens: that are left, of all kinds.
    """

    def __init__(self, aim: float | None = None) -> None:
        self.aim, self.tokens = aim, 0
        self._seconds = self._tokens = 0.0
        """For tokens of prompts: the time that is left, and tokens that take longer but may be."""
        self._measured: dict[int, float] = {}
        """Seconds of a token, by the number of bits of how many are before it."""
        self._is_warm = False

    def begin(self, tokens: int, *, alone: bool) -> None:
        """A step is scheduled, which may take so many tokens."""
        times = _ALONE if alone else 1
        self.tokens, self._tokens = max(0, tokens), _FEWEST * times if self._measured else _FIRST
        self._seconds = (self.aim or 0.0) * times

    def room(self, position: int, parts: int = 1) -> int:
        """Tokens behind `position` of a prompt that fit, if it has one of so many equal parts."""
        if self.aim is None:
            room = self.tokens
        else:
            seconds = self._token_seconds(position)
            room = int(max(self._tokens, self._seconds / seconds if seconds else 0))
        return min(self.tokens, -(-min(room, self.tokens) // parts))

    def spend(self, tokens: int, position: int | None = None) -> None:
        """The step computes so many tokens; of a prompt, if there is a `position`."""
        self.tokens = max(0, self.tokens - tokens)
        if position is not None:
            self._tokens = max(0.0, self._tokens - tokens)
            self._seconds = max(0.0, self._seconds - tokens * self._token_seconds(position))

    def note(self, prefills: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step has computed (position, tokens) of these prompts in that time. The first is not
        counted: libraries load their kernels in it."""
        total = sum(count for _, count in prefills)
        if not self._is_warm or not total:
            self._is_warm |= bool(total)
            return
        before = [self._token_seconds(position) for position, _ in prefills]
        expected = sum(s * count for s, (_, count) in zip(before, prefills, strict=True))
        for each, (position, count) in zip(before, prefills, strict=True):
            depth = _depth(position)
            now = each * seconds / expected if expected else seconds / total
            if depth in self._measured:  # a step may have been held up by anything
                weight = count / (count + 128)
                now = each + weight * (min(now, 2 * each) - each)
            self._measured[depth] = now

    def _token_seconds(self, position: int) -> float:
        depth = _depth(position)
        if not self._measured:
            return 0.0
        near = min(self._measured, key=lambda known: abs(known - depth))
        return self._measured[near] * float(_DEEPER ** max(0, depth - near))


def _depth(position: int) -> int:
    return max(position, _SHALLOW).bit_length()
