"""The cases of `bench.peers.index`: each sets an index up, then measures round by round."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from bench.peers.index.base import Index
from bench.peers.index.trace_t import Tokens, TraceT, replay

VOCABULARY = 128_000
LEAF = 16
"""Tokens of a leaf, and of the stem above it, in the eviction cases."""


class Make(Protocol):
    """Makes one library's index over `num_tokens` tokens of room."""

    def __call__(self, num_tokens: int, page_size: int, texts: list[Tokens]) -> Index: ...


Round = dict[str, Any]
"""A round's `value`, microseconds or bytes, and perhaps other numbers by name."""

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
    index = make(length + LEAF * (len(branches) + 1), page_size, [])
    for end in branches:
        index.store(index.convert(np.concatenate((tokens[:end], _random(rng, LEAF)))))
    key = index.convert(tokens)
    index.store(key)
    query = index.query(key)
    call = index.borrow if borrow else index.match
    found = call(query)
    yield {} if borrow else {"found": found}  # pages or slots
    while True:
        yield {"value": median(_timed(index, call, query) for _ in range(20))}


def convert(make: Make, seed: int, page_size: int, length: int) -> Iterator[Round]:
    tokens = _random(np.random.default_rng(seed), length).tolist()
    index = make(page_size, page_size, [])
    yield {}
    while True:
        yield {"value": median(_timed(index, index.convert_list, tokens) for _ in range(5))}


def insert(
    make: Make, seed: int, page_size: int, cached: int, new: int, rounds: int
) -> Iterator[Round]:
    """Put `new` tokens below `cached` ones that are in the index."""
    rng = np.random.default_rng(seed)
    base = _random(rng, cached)
    index = make(cached + (rounds + 2) * new, page_size, [])
    index.store(index.convert(base))
    _insert_once(index, base, _random(rng, new), cached)  # the first one extends a leaf
    yield {}
    while True:
        yield {"value": _insert_once(index, base, _random(rng, new), cached)}


def _insert_once(index: Index, base: Tokens, tail: Tokens, cached: int) -> float:
    prepared = index.prepare_insert(index.convert(np.concatenate((base, tail))), cached)
    us = _timed(index, index.insert, prepared)
    index.after_insert(prepared)
    return us


def evict(
    make: Make, seed: int, page_size: int, leaves: int, at_once: int, times: int
) -> Iterator[Round]:
    """Free the room of `at_once` of `leaves` leaves, `times` in a round; the time per leaf."""
    rng = np.random.default_rng(seed)
    stem = _random(rng, LEAF)
    index = make(LEAF * (leaves + 1), page_size, [])
    tails = rng.permutation(leaves).astype(np.int32)  # a leaf's first token is its own
    for first in tails:
        tail = np.concatenate((np.array([first], np.int32), _random(rng, LEAF - 1)))
        index.store(index.convert(np.concatenate((stem, tail))))
    gc.collect()
    yield {}
    while True:
        taken = [_timed(index, index.evict, at_once * LEAF) for _ in range(times)]
        yield {"value": median(taken) / at_once}


def chunked(
    make: Make, seed: int, page_size: int, length: int, chunks: int, rounds: int
) -> Iterator[Round]:
    """One request of `length` tokens from look-up to release, prefilled in `chunks` chunks."""
    rng = np.random.default_rng(seed)
    index = make(length * (rounds + 1), page_size, [])

    def once() -> float:
        key = index.convert(_random(rng, length))
        return _timed(index, lambda key: index.prefill_in_chunks(key, length // chunks), key)

    once()
    yield {}
    while True:
        yield {"value": once()}


def memory(make: Make, seed: int, page_size: int, leaves: int, length: int) -> Iterator[Round]:
    """Resident bytes per token of `leaves` sequences of `length`, their pool included."""
    rng = np.random.default_rng(seed)
    warm = make(4 * length, page_size, [])
    warm.store(warm.convert(_random(rng, length)))
    del warm
    before = _resident()
    index = make(leaves * length, page_size, [])
    for _ in range(leaves):
        index.store(index.convert(_random(rng, length)))
    yield {}
    yield {"value": (_resident() - before) / (leaves * length)}


def trace_t(
    make: Make, seed: int, page_size: int, conversations: int, segment: int
) -> Iterator[Round]:
    """Trace T, `segment` requests a round: the time per request, nanoseconds by phase, hits."""
    trace = TraceT(seed=seed, conversations=conversations)
    index = make(trace.num_pages(page_size) * page_size, page_size, trace.texts())
    gc.collect()
    yield {}
    done = 0
    for count in replay(trace, index):
        if count.requests % segment == 0 or count.requests == trace.requests:
            phases = index.watch.take()
            taken = sum(phases.values()) / 1000 / (count.requests - done)
            yield {"value": taken, "phases": phases, **vars(count)}
            done = count.requests


def nothing(make: Make, seed: int = 0, page_size: int = 1) -> Iterator[Round]:
    """Give back what the case before held."""
    gc.collect()
    yield {}


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (match, convert, insert, evict, chunked, memory, trace_t, nothing)
}


def _random(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _timed(index: Index, call: Callable[[Any], Any], argument: Any) -> float:
    """Microseconds."""
    watch = index.watch
    watch.start()
    call(argument)
    watch.lap("call")
    return watch.take()["call"] / 1000


def _resident() -> int:
    """Resident bytes of this process, after giving back what the allocator holds in reserve."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
