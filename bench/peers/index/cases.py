"""The cases of `bench.peers.index`: each sets an index up, then measures round by round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Protocol

import numpy as np

from bench.peers.index.base import Index, Tokens
from radixcache.bench.machine import Stopwatch

VOCABULARY = 128_000
LEAF = 16
"""Tokens of a leaf, and of the stem above it, in the eviction cases."""


class Make(Protocol):
    """Makes one library's index over `num_tokens` tokens of room."""

    def __call__(self, num_tokens: int, page_size: int) -> Index: ...


Round = dict[str, Any]
"""A round's `value` in microseconds; of the set-up the tokens `found`, if it looks something up."""

Case = Callable[..., Iterator[Round]]
"""Called with `make` and its parameters; the first round is the set-up and has no value."""


def match(
    make: Make, seed: int, page_size: int, length: int, node: int, borrow: bool = False
) -> Iterator[Round]:
    """Look up a cached prompt of `length` tokens; with `borrow` also lock, read, unlock.

    `node` > 0: another sequence leaves it every `node` tokens, so that no library can keep the
    path in one node.
    """
    rng = np.random.default_rng(seed)
    tokens = _random(rng, length)
    branches = range(node, length, node) if node else range(0)
    index = make(length + LEAF * (len(branches) + 1), page_size)
    for end in branches:
        index.store(np.concatenate((tokens[:end], _random(rng, LEAF))))
    index.store(tokens)
    query = index.query(tokens)
    call = index.borrow if borrow else index.match
    found = call(query)
    yield {} if borrow else {"found": found}  # pages or slots
    while True:
        yield {"value": median(_timed(call, query) for _ in range(20))}


def evict(
    make: Make, seed: int, page_size: int, leaves: int, at_once: int, times: int
) -> Iterator[Round]:
    """Free the room of `at_once` of `leaves` leaves, `times` in a round; the time per leaf."""
    rng = np.random.default_rng(seed)
    stem = _random(rng, LEAF)
    index = make(LEAF * (leaves + 1), page_size)
    tails = rng.permutation(leaves).astype(np.int32)  # a leaf's first token is its own
    for first in tails:
        tail = np.concatenate((np.array([first], np.int32), _random(rng, LEAF - 1)))
        index.store(np.concatenate((stem, tail)))
    gc.collect()
    yield {}
    while True:
        taken = [_timed(index.evict, at_once * LEAF) for _ in range(times)]
        yield {"value": median(taken) / at_once}


def nothing(make: Make, seed: int = 0, page_size: int = 1) -> Iterator[Round]:
    """Give back what the case before held."""
    gc.collect()
    yield {}


CASES: dict[str, Case] = {case.__name__: case for case in (match, evict, nothing)}


def _random(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


_watch = Stopwatch()


def _timed(call: Callable[[Any], Any], argument: Any) -> float:
    """Microseconds."""
    _watch.start()
    call(argument)
    _watch.lap("call")
    return _watch.take()["call"] / 1000
