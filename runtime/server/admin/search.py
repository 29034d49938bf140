"""Finds a text in the tree."""

from __future__ import annotations

from collections.abc import Sequence

from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.snapshot import Spelled

MAX_HITS = 100


def search(
    nodes: Sequence[Spelled], text: str, tokenizer: Tokenizer
) -> tuple[list[list[str]], int]:
    """The ids from the root to each node in which `text` ends, regardless of case.

    Returns the first `MAX_HITS` in the tree's order, and how many there are. Each node is decoded
    by itself, so a character whose bytes are in two nodes is not found.

    Args:
        nodes: of `Outline.spell`, children after their parents.
    """
    wanted, children = text.casefold(), [list[int]() for _ in nodes]
    todo = [(at, "", -1) for at, node in enumerate(nodes) if node.parent < 0][::-1]
    for at, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].append(at)
    path: list[int] = []
    hits: list[list[str]] = []
    total = 0
    while todo:
        at, before, parent = todo.pop()  # the text up to here, one character short of `wanted`
        while path and path[-1] != parent:
            path.pop()
        path.append(at)
        here = before + tokenizer.show(nodes[at].tokens.tolist()).casefold()
        if wanted in here:
            total += 1
            if total <= MAX_HITS:
                hits.append([nodes[one].id for one in path])
        tail = here[max(0, len(here) - len(wanted) + 1) :]
        todo += [(child, tail, at) for child in reversed(children[at])]
    return hits, total
