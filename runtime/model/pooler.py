"""Makes vectors and scores of rows, on the host and one row at a time: the bits of a row's answer
depend on nothing else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest
from radixcache.runtime.checkpoints.pooling import Pooling

Row = NDArray[np.float32]


class ScoreHead(NamedTuple):
    """Rows of a classification head, or of lm_head.

    Attributes:
        weight: [n, hidden_size] float32.
        scale, softcap: those of logits, for rows of lm_head.
    """

    weight: NDArray[np.float32]
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, row: Row) -> NDArray[np.float64]:
        """[n], summed in float64."""
        found = (self.weight.astype(np.float64) * row).sum(1) * self.scale
        return found if self.softcap is None else np.tanh(found / self.softcap) * self.softcap


class Pooler:
    """What a model makes of its rows.

    Args:
        head: of its scores; None if it has none.
    """

    def __init__(self, pooling: Pooling, head: ScoreHead | None = None) -> None:
        self.pooling, self._head = pooling, head

    def check_vectors(self, hidden_size: int, dimensions: int | None) -> None:
        """Raise `InvalidRequest` unless rows become vectors of so many numbers."""
        if self.pooling.task == "score":
            raise InvalidRequest("this model scores texts and makes no vectors of them")
        if dimensions is None:
            return
        is_count = isinstance(dimensions, int | np.integer) and not isinstance(dimensions, bool)
        if not is_count or not 1 <= dimensions <= hidden_size:
            raise InvalidRequest(
                f"dimensions must be from 1 to {hidden_size}, the model's, not {dimensions!r}"
            )

    def check_scores(self) -> None:
        """Raise `InvalidRequest` unless rows become scores."""
        if self.pooling.task == "embed":
            raise InvalidRequest("this model embeds texts and scores no pairs: compare vectors")
        if self._head is None:
            raise InvalidRequest(
                "this model has no scores: its tokenizer has no one token for yes and for no, or "
                "transformers' own layers run it"
            )
        count = len(self._head.weight)
        if count > 2 or (count == 2 and not self._is_pair):
            raise InvalidRequest(f"this model sorts texts into {count} classes and has no score")

    def vector(self, row: Row, dimensions: int | None = None) -> Row:
        """[dimensions] float32: the row's first numbers, of length 1 if the model normalizes."""
        kept = row[:dimensions].astype(np.float64)
        if self.pooling.normalize:
            kept /= max(float(np.sqrt((kept * kept).sum())), 1e-12)
        return kept.astype(np.float32)

    def score(self, row: Row) -> float:
        """From 0 to 1: the sigmoid of the head's logit, or of yes less no, which is the probability
        of yes among the two."""
        assert self._head is not None
        logits = self._head.logits(row)
        logit = float(logits[0] - logits[1] if len(logits) == 2 else logits[0])
        if logit >= 0:
            return float(1 / (1 + np.exp(-logit)))
        return float(np.exp(logit) / (1 + np.exp(logit)))

    @property
    def _is_pair(self) -> bool:
        judges, labels = self.pooling.judges, self.pooling.labels
        return judges is not None or [label.lower() for label in labels] == ["yes", "no"]
