"""What no scheme can beat, and what LRU gives at every size of memory, without a replay.

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
from numpy.typing import NDArray

from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.nodes import common_length

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
        self.children: dict[bytes, _Edge] = {}
        self.number = -1


def build_trie(
    workload: Workload, block: int = 1, progress: Callable[[], object] = lambda: None
) -> Trie:
    """The trie of a workload. O(tokens).

    Args:
        block: sequences share whole blocks of this many tokens only; what remains at their ends
            does not count.
        progress: called after each request.
    """
    root = _Edge(None, 0, np.empty(0, np.int32))
    ends: list[tuple[_Edge, _Edge]] = []
    for arrival in workload.arrivals:
        tokens = arrival.tokens()
        hittable = _insert(root, tokens[: (arrival.prompt_tokens - 1) // block * block], block)
        ends.append((hittable, _insert(root, tokens[: len(tokens) // block * block], block)))
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


def _insert(root: _Edge, tokens: Tokens, block: int) -> _Edge:
    """The edge with whose end `tokens` end, made or cut off as needed."""
    edge, position = root, 0
    while position < len(tokens):
        key = tokens[position : position + block].tobytes()
        child = edge.children.get(key)
        if child is None:
            child = edge.children[key] = _Edge(edge, position, tokens[position:].copy())
            return child
        length = min(len(child.tokens), len(tokens) - position)
        same = common_length(child.tokens[:length], tokens[position : position + length])
        same -= same % block
        if same < len(child.tokens):
            upper = _Edge(edge, position, child.tokens[:same])
            child.parent, child.start, child.tokens = upper, position + same, child.tokens[same:]
            upper.children[child.tokens[:block].tobytes()] = child
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


@dataclass
class LRUCurve:
    """Hits under LRU as a function of memory, all sizes from one pass over the trie.

    LRU is a stack algorithm (Mattson et al., 1970): what fits a smaller memory is in every larger
    one. Here the order is of tokens: by the last request that used them and, within one, the deeper
    ones first to go. A token is hit in every memory that holds all tokens used later, and itself.

    Attributes:
        before: for each run of hit tokens, how many tokens were used later than its first.
        lengths: tokens of each run.
    """

    before: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def hits(self, memory: int) -> int:
        """Tokens hit in `memory` tokens. O(runs)."""
        return int(np.clip(memory - self.before, 0, self.lengths).sum())


def lru_curve(trie: Trie) -> LRUCurve:
    """The curve of a workload. O(segments of all paths), and a sum over the requests for each hit.

    Exact for a token-exact tree at page size 1, one request at a time, but for tokens that are
    computed although they are cached (a prompt's last, and answers that were given before): each
    has a page of its own for a moment, for which another token may go. With the trie of blocks,
    for block caches but for their pages that are not full. Says nothing of memories that are
    smaller than the longest request.
    """
    last_use = [-1] * len(trie.lengths)
    used = np.zeros(len(trie.paths), np.int64)  # by each request, and by none after it
    before, lengths = [], []
    for number, path in enumerate(trie.paths):
        above, above_use = 0, -1
        for segment in path[: trie.hittable[number]]:
            use = last_use[segment]
            if use < 0:
                break
            if use != above_use:
                above, above_use = int(used[use + 1 :].sum()), use
            before.append(above)
            lengths.append(trie.lengths[segment])
            above += trie.lengths[segment]
        for segment in path:
            if last_use[segment] >= 0:
                used[last_use[segment]] -= trie.lengths[segment]
            last_use[segment] = number
        used[number] += sum(trie.lengths[segment] for segment in path)
    return LRUCurve(np.array(before, np.int64), np.array(lengths, np.int64))
