"""Where in the tree a text is."""

from __future__ import annotations

from collections.abc import Sequence

from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.snapshot import Spelled

MAX_HITS = 100


def search(
    nodes: Sequence[Spelled], text: str, tokenizer: Tokenizer
) -> tuple[list[list[str]], int]:
    """The ids from the root to each node in which `text` ends, letter case apart.

    The first `MAX_HITS`, in the order of the tree, and how many there are. Each node's tokens are
    decoded by themselves: a character whose bytes are in two nodes is not found.

    Args:
        nodes: as `Outline.spell` tells them.
    """
    wanted = text.casefold()
    tails: list[str] = []  # of the text up to a node's end, one character short of what is wanted
    found: list[int] = []
    for at, (_, parent, tokens) in enumerate(nodes):
        before = tails[parent] if parent >= 0 else ""
        here = before + tokenizer.decode(tokens.tolist(), special=True).casefold()
        tails.append(here[max(0, len(here) - len(wanted) + 1) :])
        if wanted in here:
            found.append(at)
    rows = _rows(nodes)
    paths = [_path(nodes, at) for at in sorted(found, key=rows.__getitem__)[:MAX_HITS]]
    return [[nodes[at].id for at in path] for path in paths], len(found)


def _rows(nodes: Sequence[Spelled]) -> list[int]:
    """The places of the nodes from top to bottom, as the tree is drawn."""
    count = [1] * len(nodes)
    for at in range(len(nodes) - 1, -1, -1):
        if (parent := nodes[at].parent) >= 0:
            count[parent] += count[at]
    free = 0  # for the next of the top nodes
    inside: list[int] = []  # for the next child of each
    rows: list[int] = []
    for size, (_, parent, _) in zip(count, nodes, strict=True):
        row = inside[parent] if parent >= 0 else free
        if parent >= 0:
            inside[parent] += size
        else:
            free += size
        rows.append(row)
        inside.append(row + 1)
    return rows


def _path(nodes: Sequence[Spelled], at: int) -> list[int]:
    path = [at]
    while (at := nodes[at].parent) >= 0:
        path.append(at)
    return path[::-1]
