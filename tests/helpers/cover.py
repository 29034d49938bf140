"""Which cases of a product of parameters every run of the tests takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def covering(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` over all combinations, of which `make test` runs enough to let any two values
    of two parameters meet. The others are marked `exhaustive`.

    Faults that need three or more values at once are what the exhaustive run is for (pairwise
    testing; Cohen et al., "The AETG System", 1997, choose greedily in this way, too).
    """
    return covering_of(list(axes), list(product(*axes.values())))


def covering_of(names: Sequence[str], cases: Sequence[Case]) -> pytest.MarkDecorator:
    """The same over these cases alone, where not all combinations are any."""
    chosen = set(cover_pairs(cases))
    params = [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.exhaustive)
        for case in cases
    ]
    return pytest.mark.parametrize(tuple(names), params)


def cover_pairs(cases: Sequence[Case]) -> list[Case]:
    """A few of `cases` in which every pair of values occurs that occurs in any of them."""
    open_pairs: set[Any] = set().union(*map(pairs, cases))
    chosen = []
    while open_pairs:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & open_pairs)))
        open_pairs -= pairs(chosen[-1])
    return chosen


def pairs(case: Case) -> set[Any]:
    """Its values by two, each with its position; the value itself where there is only one."""
    return set(combinations(enumerate(case), 2)) or {(0, *case)}


def seeds(first: int, more: int) -> pytest.MarkDecorator:
    """`parametrize` over seeds: `first` in every run, `more` after it in the exhaustive one."""
    others = range(first + 1, first + 1 + more)
    marked = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in others]
    return pytest.mark.parametrize("seed", [first, *marked])
