"""Where the sharing in a workload is: its trie, small enough to be drawn."""

from __future__ import annotations

from dataclasses import dataclass

from radixcache.bench.schemes.bounds import Trie


@dataclass
class Segment:
    """Tokens that the same requests have in common, or what follows a segment in small parts.

    Attributes:
        parent: index of the segment before it, -1 at the beginning.
        start: position of its first token.
        tokens: its length; of a folded one the mean over its requests.
        requests: how many have it.
        folded: how many segments of the trie this one stands for.
    """

    parent: int
    start: int
    tokens: float
    requests: int
    folded: int = 1


def shared_tree(trie: Trie, most: int = 200) -> list[Segment]:
    """The `most` segments through which most tokens pass, parents first, and after them what
    follows each, folded into one. Tokens x requests add up to those of the workload.
    O(segments of all paths + segments x log segments).
    """
    count = len(trie.lengths)
    requests, parents = [0] * count, [-1] * count
    for path in trie.paths:
        for parent, segment in zip([-1, *path], path, strict=False):
            requests[segment] += 1
            parents[segment] = parent
    through = [n * length for n, length in zip(requests, trie.lengths, strict=True)]
    sizes = [1] * count
    for segment in sorted(range(count), key=trie.starts.__getitem__, reverse=True):
        if (parent := parents[segment]) >= 0:
            through[parent] += through[segment]
            sizes[parent] += sizes[segment]
    kept = sorted(range(count), key=lambda segment: -through[segment])[:most]
    numbers = {segment: number for number, segment in enumerate(kept)} | {-1: -1}
    shown = [
        Segment(numbers[parents[s]], trie.starts[s], trie.lengths[s], requests[s]) for s in kept
    ]
    small: dict[int, list[int]] = {}
    for segment in range(count):
        if segment not in numbers and parents[segment] in numbers:
            small.setdefault(parents[segment], []).append(segment)
    for parent, segments in small.items():
        many = sum(requests[s] for s in segments)
        mean = sum(through[s] for s in segments) / many
        folded = sum(sizes[s] for s in segments)
        shown.append(Segment(numbers[parent], trie.starts[segments[0]], mean, many, folded))
    return shown
