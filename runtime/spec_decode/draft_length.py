"""Decides how many tokens to draft, by their measured gain and cost.

A step of n rows takes about F + r * n, and J more if it is not one row alone: then the weights are
multiplied by a matrix instead of a vector. A drafted token makes the step r longer; if it is
accepted, it saves the time of a token without drafts: with B sequences, a B-th of a step. So it
pays while the chance that it and all before it are accepted exceeds r over that. The acceptance
rate alone does not decide: in a large batch even good drafts cost more than they save (vLLM's pull
request 26504).
"""

from __future__ import annotations

from math import inf
from typing import Literal, get_args

import numpy as np

from radixcache.runtime.spec_decode.suffix_index import MAX_MATCH

Source = Literal["tree", "suffix"]
"""Where a draft comes from: a text that continues the whole sequence, or only its end."""

SOURCES: tuple[Source, ...] = get_args(Source)

Kind = tuple[Source, bool]
"""A source, and whether tokens are sampled at a temperature above 0."""

_POSITIONS = 3  # the first token of a draft, the second, and any other
_MEMORY = 200  # observations of a chance; then they count half
_PRIOR = 4  # observations that a chance before any is worth
_DECAY = 0.99  # of a step's weight per later step
_FIT_EVERY = 16  # steps
_GUESS = (0.95, 0.0, 0.05)  # F, J and r before any step, as shares of its time
_GUESSED = 0.5  # steps that the guess counts for
CAUTION = 1.25  # times the cost: drafts gain less than their chances promise
_OUTLIER = 4.0  # times the mean: something else has run

_CHANCES: dict[Source, tuple[float, ...]] = {
    "suffix": (0.0, 0.35, 0.45, 0.6, 0.7, 0.85, 0.95),  # as on recorded chats and agents
    "tree": (0.8, 0.85, 0.9, 0.95, 0.95, 0.95, 0.98),
}
"""The chance that a first token is right before any is seen, by the match's bit length."""


class DraftLength:
    """Learns chances and step times, and from them how long drafts should be."""

    def __init__(self) -> None:
        self._tried: dict[Kind, list[list[float]]] = {}
        self._accepted: dict[Kind, list[list[float]]] = {}
        for source, chances in _CHANCES.items():
            for kind in ((source, False), (source, True)):
                self._tried[kind] = [[float(_PRIOR)] * _POSITIONS for _ in chances]
                self._accepted[kind] = [
                    [_PRIOR * (1 - (1 - chance) / (1 + at)) for at in range(_POSITIONS)]
                    for chance in chances
                ]
        self._sums = [0.0] * 8
        self._num_steps = 0
        self._fit = [*_GUESS]
        """F, J and r, in seconds; before any step in any unit."""

    def chances(self, kind: Kind, match: int, count: int, least: float) -> list[float]:
        """The chances that a draft of `count` tokens is right up to each of them, behind a match of
        that length; those greater than `least`."""
        accepted = self._row(self._accepted, kind, match)
        tried = self._row(self._tried, kind, match)
        chance, found = 1.0, []
        for place in range(count):
            at = min(place, _POSITIONS - 1)
            chance *= accepted[at] / tried[at]
            if chance <= least:
                break
            found.append(chance)
        return found

    def learn(self, kind: Kind, match: int, accepted: int, refused: bool) -> None:
        """Learn that a draft's first tokens were accepted, and whether the next was refused."""
        for place in range(accepted + refused):
            at = min(place, _POSITIONS - 1)
            right, tried = (self._row(sums, kind, match) for sums in (self._accepted, self._tried))
            tried[at] += 1
            right[at] += place < accepted
            if tried[at] > _MEMORY:
                tried[at] /= 2
                right[at] /= 2

    @staticmethod
    def _row(sums: dict[Kind, list[list[float]]], kind: Kind, match: int) -> list[float]:
        return sums[kind][min(match, MAX_MATCH).bit_length() - 1 if match else 0]

    def note_step(self, rows: int, seconds: float) -> None:
        """Learn from a step without prefill: its tokens and its seconds."""
        if self._num_steps > 20 and seconds > _OUTLIER * self.step_seconds:
            return
        jump = float(rows > 1)
        sample = (
            1.0,
            jump,
            rows,
            jump * rows,
            rows * rows,
            seconds,
            jump * seconds,
            rows * seconds,
        )
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, sample, strict=True)]
        self._num_steps += 1
        if self._num_steps % _FIT_EVERY == 0:
            # Least squares; the guess counts as a few steps that show each part alone.
            one, j, n, jn, nn, t, jt, nt = self._sums
            guess = np.array(_GUESS) * self.step_seconds
            products = np.array([[one, j, n], [j, j, jn], [n, jn, nn]]) + _GUESSED * np.eye(3)
            fit = np.linalg.solve(products, np.array([t, jt, nt]) + _GUESSED * guess)
            self._fit = np.maximum(fit, 1e-3 * guess).tolist()

    @property
    def step_seconds(self) -> float:
        """The recent time of a step; infinite before any."""
        return self._sums[5] / self._sums[0] if self._sums[0] else inf

    def costs(self, num_sequences: int) -> tuple[float, float]:
        """The cost of a drafted token, and of drafting at all, in a step of so many sequences: in
        tokens, by the time of one without drafts."""
        fixed, jump, row = self._fit
        alone = num_sequences == 1
        token = (fixed + (0 if alone else jump)) / num_sequences + row
        return CAUTION * row / token, CAUTION * jump / token if alone else 0.0
