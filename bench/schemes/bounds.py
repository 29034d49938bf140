"""Bounds that no scheme can beat, computed without a replay.

All of it is computed on the trie of the workload, with one request after the other in their order
of arrival. So served, no scheme is above the optimum, unless its pages refuse a request for which
the optimum clears the memory. With many in flight one can be: where some overtake others, and where
an answer takes its memory only as it grows, while another request already hits what has to go for
it. A report says so where it happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.tokens import common_length

_NEVER = 1 << 60


@dataclass
class Trie:
    """All sequences of a workload, as paths over segments that they share whole or not at all.

    Attributes:
        lengths: tokens of each segment.
        starts: position of its first token in every sequence through it.
        paths: for each request the segments of its prompt and answer, from the root.
        hittable: for each request how many of them lie before its prompt's last token.
    """

    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    hittable: list[int] = field(default_factory=list)

    @property
    def footprint(self) -> int:
        """Distinct tokens: what unlimited memory would have to hold."""
        return sum(self.lengths)


class _Edge:
    """Tokens from position `start` on, of every sequence through it; ends where sequences part."""

    __slots__ = ("children", "number", "parent", "start", "tokens")

    def __init__(self, parent: _Edge | None, start: int, tokens: Tokens) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: dict[int, _Edge] = {}
        self.number = -1


def build_trie(workload: Workload, progress: Callable[[], object] = lambda: None) -> Trie:
    """The trie of a workload; `progress` is called after each request. O(tokens)."""
    root = _Edge(None, 0, np.empty(0, np.int32))
    ends: list[tuple[_Edge, _Edge]] = []
    for arrival in workload.arrivals:
        tokens = arrival.tokens()
        hittable = _insert(root, tokens[: arrival.prompt_tokens - 1])
        ends.append((hittable, _insert(root, tokens)))
        progress()
    trie = Trie()
    for hittable, last in ends:
        path: list[int] = []
        below = None
        edge = last
        while edge.parent is not None:
            if edge is hittable:
                below = len(path)
            if edge.number < 0:
                edge.number = len(trie.lengths)
                trie.lengths.append(len(edge.tokens))
                trie.starts.append(edge.start)
            path.append(edge.number)
            edge = edge.parent
        trie.paths.append(path[::-1])
        trie.hittable.append(0 if below is None else len(path) - below)
    return trie


def _insert(root: _Edge, tokens: Tokens) -> _Edge:
    """The edge with whose end `tokens` end, made or cut off as needed."""
    edge, position = root, 0
    while position < len(tokens):
        key = int(tokens[position])
        child = edge.children.get(key)
        if child is None:
            child = edge.children[key] = _Edge(edge, position, tokens[position:].copy())
            return child
        length = min(len(child.tokens), len(tokens) - position)
        same = common_length(child.tokens[:length], tokens[position : position + length])
        if same < len(child.tokens):
            upper = _Edge(edge, position, child.tokens[:same])
            child.parent, child.start, child.tokens = upper, position + same, child.tokens[same:]
            upper.children[int(child.tokens[0])] = child
            edge.children[key] = child = upper
        edge, position = child, position + same
    return edge


def unlimited_hits(trie: Trie) -> int:
    """Tokens hit if nothing is ever evicted. O(segments of all paths)."""
    seen: set[int] = set()
    hits = 0
    for path, hittable in zip(trie.paths, trie.hittable, strict=True):
        hits += sum(trie.lengths[segment] for segment in path[:hittable] if segment in seen)
        seen.update(path)
    return hits


def optimal_hits(trie: Trie, memory: int) -> int:
    """Tokens hit in `memory` tokens if eviction knows the future (Belady's rule).

    Whenever room is short, the token that is asked for again last goes, of equal ones the deepest.
    Requests that the runtime refuses at page size 1, where a page is kept to spare, are left out.
    O(segments of all paths x log segments).
    """
    uses: list[list[int]] = [[] for _ in trie.lengths]
    served = [sum(trie.lengths[segment] for segment in path) < memory for path in trie.paths]
    for number in reversed(range(len(trie.paths))):  # so that the next use stands last
        for segment in trie.paths[number][: trie.hittable[number]] if served[number] else ():
            uses[segment].append(number)
    resident = [0] * len(trie.lengths)
    next_use = [_NEVER] * len(trie.lengths)
    farthest: list[tuple[int, int, int]] = []  # the heap's first is used last, and deepest
    held = hits = 0
    for number, path in enumerate(trie.paths):
        if not served[number]:
            continue
        for segment in path[: trie.hittable[number]]:
            uses[segment].pop()
        for segment in path[: trie.hittable[number]]:
            hits += resident[segment]
            if resident[segment] < trie.lengths[segment]:
                break
        for segment in path:
            held += trie.lengths[segment] - resident[segment]
            resident[segment] = trie.lengths[segment]
            next_use[segment] = -1  # in use: what the heap says of it is out of date
        while held > memory:
            use, _, segment = farthest[0]
            if next_use[segment] != -use or not resident[segment]:
                heapq.heappop(farthest)
                continue
            gone = min(held - memory, resident[segment])
            resident[segment] -= gone
            held -= gone
        for segment in path:
            next_use[segment] = uses[segment][-1] if uses[segment] else _NEVER
            heapq.heappush(farthest, (-next_use[segment], -trie.starts[segment], segment))
    return hits
