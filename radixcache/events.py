"""Events that a cache sends to its listeners; without a listener, none is made."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Stored:
    """Positions [start, len(tokens)) of the prefix `tokens` have become cached."""

    namespace: Hashable
    tokens: NDArray[np.int32]
    start: int


@dataclass(frozen=True, eq=False)
class Evicted:
    """Positions [start, len(tokens)) of the prefix `tokens` are no longer cached."""

    namespace: Hashable
    tokens: NDArray[np.int32]
    start: int


@dataclass(frozen=True)
class Cleared:
    """The cache is empty, after a `reset` or a `recover`."""


Listener = Callable[[Stored | Evicted | Cleared], None]
