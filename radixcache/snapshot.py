"""A picture of what is cached, for people to look at: small, and with names that last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

PREVIEW = 24
"""Tokens of a node that a picture holds."""

MAX_DEPTH = 100
"""Levels that a picture holds: nested formats are read by recursion."""

ROOT = ""
"""The id of the empty prefix, where each namespace begins."""

T = TypeVar("T")


@dataclass(eq=False)
class CachedNode:
    """Tokens that the prefixes below it have in common; the root of a namespace has none.

    Attributes:
        id: the same from one picture to the next, for as long as the node lives.
        start: position of the first token.
        num_tokens: how many there are.
        tokens: the first `PREVIEW` of them.
        age: logical time since it or what is below was last used, 0 while a lease is there. Only
            comparisons within one picture mean something.
        leases: those that end here or below, pins apart.
        pins: names of the pinned prefixes that end here.
        pinned: whether a pinned prefix goes through it.
        num_hidden: children that the picture leaves out.
    """

    id: str
    start: int = 0
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    age: int = 0
    leases: int = 0
    pins: list[str] = field(default_factory=list)
    pinned: bool = False
    children: list[CachedNode] = field(default_factory=list)
    num_hidden: int = 0


def draw(
    tops: Mapping[Hashable, Iterable[T]],
    describe: Callable[[T], CachedNode],
    below: Callable[[T], Iterable[T]],
    max_nodes: int,
) -> dict[Hashable, CachedNode]:
    """A root for each namespace, and at most `max_nodes` nodes below all of them together.

    Level by level, so that what many prefixes share is shown first; where more nodes stand side by
    side than fit, the newest. O(nodes shown + their children).

    Args:
        tops: the nodes of each namespace without a parent, oldest first.
        describe: a node alone, with `age`, `leases` and `pins` of its own.
        below: the children of a node, oldest first.
    """
    drawn = {namespace: CachedNode(id=ROOT) for namespace in tops}
    seen: list[CachedNode] = []
    queue = deque((drawn[namespace], list(nodes), 1) for namespace, nodes in tops.items())
    while queue:
        parent, nodes, depth = queue.popleft()
        room = max_nodes - len(seen) if depth <= MAX_DEPTH else 0
        shown = nodes[max(0, len(nodes) - room) :]
        parent.num_hidden = len(nodes) - len(shown)
        for node in shown:
            picture = describe(node)
            parent.children.append(picture)
            seen.append(picture)
            queue.append((picture, list(below(node)), depth + 1))
    for picture in [*reversed(seen), *drawn.values()]:  # children before their parents
        children = picture.children
        picture.leases += sum(child.leases for child in children)
        picture.pinned = bool(picture.pins) or any(child.pinned for child in children)
        ages = [child.age for child in children]
        picture.age = 0 if picture.leases else min([picture.age, *ages])
    return drawn
