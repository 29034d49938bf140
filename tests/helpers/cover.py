"""Which cases of a product of parameters every run of the tests takes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def covering(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` over enough combinations that in `make test` any two values of two parameters
    meet, and any three of three in those marked `exhaustive`.

    Two values were enough for 70 to 97 % of the faults of four systems, three for 89 to 99 % (Kuhn
    et al., "Software Fault Interactions and Implications for Software Testing", 2004). Cases are
    chosen greedily (Cohen et al., "The AETG System", 1997).
    """
    return covering_of(list(axes), list(product(*axes.values())))


def covering_of(names: Sequence[str], cases: Sequence[Case]) -> pytest.MarkDecorator:
    """The same over these cases alone, where not all combinations are any."""
    chosen = cover(cases, 2)
    more = [case for case in cover(cases, 3) if case not in chosen]
    exhaustive = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in more]
    return pytest.mark.parametrize(tuple(names), [*chosen, *exhaustive])


def cover(cases: Sequence[Case], size: int) -> list[Case]:
    """A few of `cases` in which any `size` values meet that meet in any of them."""
    chosen, met = list[Case](), set[Any]()
    # What a case adds only shrinks: the first whose count is as it was is the best.
    heap = [(-len(tuples(case, size)), number) for number, case in enumerate(cases)]
    heapify(heap)
    while heap:
        count, number = heap[0]
        new = tuples(cases[number], size) - met
        if not new:
            heappop(heap)
        elif len(new) < -count:
            heapreplace(heap, (-len(new), number))
        else:
            chosen.append(cases[number])
            met |= new
    return chosen


def tuples(case: Case, size: int) -> set[Any]:
    """Its values by `size`, each with its position; all of them where there are fewer."""
    return set(combinations(enumerate(case), min(size, len(case))))


def seeds(first: int, more: int, count: int = 1) -> pytest.MarkDecorator:
    """`parametrize` over seeds: `count` of them from `first` on in every run, `more` after these in
    the exhaustive one."""
    end = first + count
    marked = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(end, end + more)]
    return pytest.mark.parametrize("seed", [*range(first, end), *marked])
