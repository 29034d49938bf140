"""The rows of a step's logits that a token is drawn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixcache.runtime.request import Sequence
from radixcache.tokens import Tokens


class Row(NamedTuple):
    """The logits behind a sequence and the first tokens of its draft, or none."""

    sequence: Sequence
    draft: Tokens

    @property
    def position(self) -> int:
        """Position of the token to draw."""
        return self.sequence.num_computed + len(self.draft)

    @property
    def generated(self) -> Tokens:
        """The tokens generated before this row, if its drafts come true."""
        generated = self.sequence.generated
        return np.concatenate([generated, self.draft]) if len(self.draft) else generated


def by_sequence(rows: list[Row]) -> dict[Sequence, list[int]]:
    """The sequences of a step, each with the places of its rows."""
    places: dict[Sequence, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.sequence, []).append(place)
    return places
