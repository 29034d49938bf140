"""How many tokens of a draft pay: by what they are worth and by what they cost, both measured.

A step of B sequences takes about F + r * B; each drafted token makes it r longer, and is worth what
a token takes without drafts, (F + r * B) / B, if it is accepted. So it pays while the chance of
that, and of all before it, exceeds r * B / (F + r * B). The acceptance rate alone says nothing: in
a large batch even good drafts make a step slower than they save (vLLM's pull request 26504).
"""

from __future__ import annotations

from math import inf
from typing import Literal, get_args

from radixcache.runtime.spec_decode.suffix_index import MAX_MATCH

Source = Literal["tree", "suffix"]
"""What a draft is taken from: a text that goes on from the whole sequence, or from its end."""

SOURCES: tuple[Source, ...] = get_args(Source)

_POSITIONS = 3  # the first token of a draft, the second, and any other
_MEMORY = 200  # observations of a chance; then they count half
_PRIOR = 8  # observations that a chance before any is worth
_DECAY = 0.99  # of a step's weight, with each step after it
_SHARE = 0.05  # r / F before steps have told it: as of a small Llama on two cores
_SHARES = (1e-4, 1.0)
_OUTLIER = 4.0  # times the mean: something else has run

_CHANCES: dict[Source, tuple[float, ...]] = {
    "suffix": (0.0, 0.35, 0.45, 0.6, 0.7, 0.85, 0.95),  # as on recorded chats and agents
    "tree": (0.8, 0.85, 0.9, 0.95, 0.95, 0.95, 0.98),
}
"""That a first token is right, before any is seen; by the bits of the match's length."""


class DraftLength:
    """Learns chances and step times, and from them how long drafts should be."""

    def __init__(self) -> None:
        self._tried: dict[Source, list[list[float]]] = {}
        self._accepted: dict[Source, list[list[float]]] = {}
        for source, chances in _CHANCES.items():
            self._tried[source] = [[float(_PRIOR)] * _POSITIONS for _ in chances]
            self._accepted[source] = [
                [_PRIOR * (1 - (1 - chance) / (1 + at)) for at in range(_POSITIONS)]
                for chance in chances
            ]
        self._sums = [0.0] * 5  # weights, rows, seconds, rows squared, rows * seconds
        self._share = _SHARE

    def chances(self, source: Source, match: int, count: int) -> list[float]:
        """[count] that a draft is right up to each of its tokens, behind a match of that length."""
        accepted, tried = (
            self._row(self._accepted, source, match),
            self._row(self._tried, source, match),
        )
        chance, found = 1.0, []
        for place in range(count):
            at = min(place, _POSITIONS - 1)
            chance *= accepted[at] / tried[at]
            found.append(chance)
        return found

    def learn(self, source: Source, match: int, accepted: int, refused: bool) -> None:
        """A draft's first tokens were accepted, and then one refused, or nothing was seen."""
        for place in range(accepted + refused):
            at = min(place, _POSITIONS - 1)
            right, tried = (
                self._row(sums, source, match) for sums in (self._accepted, self._tried)
            )
            tried[at] += 1
            right[at] += place < accepted
            if tried[at] > _MEMORY:
                tried[at] /= 2
                right[at] /= 2

    @staticmethod
    def _row(sums: dict[Source, list[list[float]]], source: Source, match: int) -> list[float]:
        return sums[source][min(match, MAX_MATCH).bit_length() - 1 if match else 0]

    def note_step(self, rows: int, seconds: float) -> None:
        """A step without prefill has computed so many tokens in so many seconds."""
        weight, total_rows, total, squares, products = self._sums
        if weight > 1 / (1 - _DECAY) / 4 and seconds > _OUTLIER * total / weight:
            return
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_DECAY * old + one for old, one in zip(self._sums, new, strict=True)]
        weight, total_rows, total, squares, products = self._sums
        spread = weight * squares - total_rows**2
        if spread > (0.1 * total_rows) ** 2:  # else they tell no slope
            slope = (weight * products - total_rows * total) / spread
            fixed = (total - slope * total_rows) / weight
            least, most = _SHARES
            self._share = most if fixed <= 0 else min(max(slope / fixed, least), most)

    @property
    def step_seconds(self) -> float:
        """How long a step took of late; infinite before any."""
        return self._sums[2] / self._sums[0] if self._sums[0] else inf

    def threshold(self, num_sequences: int) -> float:
        """The chance from which on a drafted token pays in a step of so many sequences."""
        cost = self._share * num_sequences
        return cost / (1 + cost)
