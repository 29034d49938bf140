"""One tree of a radix tree's nodes and the pages that only lower tiers hold, for pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

from radixcache.nodes import NOBODY, Node, Tokens
from radixcache.stored_pages import StoredPage
from radixcache.tier import LowerTier
from radixcache.tree import RadixTree

MAX_PAGES = 10_000
"""The most recently used pages of a tier: more would keep the engine's thread too long."""


class LowerNode:
    """Pages of a tier that follow each other without a branch, or the part of a node up to a place
    inside it where pages of a tier branch off. Other attributes are as in `Node`.

    Attributes:
        below: its children.
        medium: the tier of the first page.
    """

    leases, last_use = NOBODY, 0

    def __init__(self, start: int, tokens: Tokens, serial: str, medium: str) -> None:
        self.start, self.end, self.tokens = start, start + len(tokens), tokens
        self.serial, self.medium = serial, medium
        self.below: list[LowerNode | Node] = []


class TieredTree:
    """All nodes of a tree, and of each tier up to `MAX_PAGES` that continue them; valid until one
    of them changes.

    O(tokens without a salt) to make, if there are tiers: 40 ms for 200,000 (Zen 4).
    """

    def __init__(self, tree: RadixTree, tier: LowerTier[Any] | None) -> None:
        self._tree = tree
        self._after = defaultdict[Node, list[LowerNode]](list)
        self._parts: dict[Node, tuple[LowerNode, int]] = {}
        """The parts of a node that is cut: the first one, and the position of the last one."""
        self._root = tree.find_root(None) or RadixTree(tree.pool).root(None)
        if tier is not None and len(tier):
            self._add(tier)

    def tops(self) -> dict[Hashable, list[Node | LowerNode]]:
        """The first nodes of each namespace."""
        roots = self._tree.roots | ({None: self._root} if self._root in self._after else {})
        return {namespace: self.below(root) for namespace, root in roots.items()}

    def below(self, node: Node | LowerNode) -> list[Node | LowerNode]:
        """The children of a node."""
        if isinstance(node, LowerNode):
            return node.below
        children = node.children.values()
        own = (self._parts[child][0] if child in self._parts else child for child in children)
        return [*own, *self._after.get(node, ())]

    def start(self, node: Node | LowerNode) -> int:
        """The first position of a node, or of its last part."""
        part = self._parts.get(node) if isinstance(node, Node) else None
        return node.start if part is None else part[1]

    def _add(self, tier: LowerTier[Any]) -> None:
        ends = _page_ends(self._root, tier.page_size)
        self._media: dict[bytes, str] = {}
        self._following = defaultdict[bytes, list[StoredPage]](list)
        for one in tier.chain():
            for page in islice(one.newest(), MAX_PAGES):
                if page.is_of_window or page.state == "lost":
                    continue
                if page.key not in ends and page.key not in self._media:
                    self._media[page.key] = one.medium
                    self._following[page.parent].append(page)
        amid = defaultdict[Node, list[LowerNode]](list)
        for key in [key for key in self._following if key in ends]:
            for page in self._following[key]:
                node, start = ends[key]
                node, at = self._tree.descend(node, start, page.tokens)
                new = self._grow(page, start)
                new.start, new.tokens = at, new.tokens[at - start :]
                if len(new.tokens):  # else a part of a page that the tree has, too
                    (self._after if at == node.end else amid)[node].append(new)
        for node, below in amid.items():
            self._cut(node, sorted(below, key=lambda new: new.start))

    def _grow(self, page: StoredPage, start: int) -> LowerNode:
        """The node that begins with a page, and all below."""
        top = LowerNode(start, page.tokens[:0], "", "")
        grown, roots = [(top, page)], list[LowerNode]()
        while grown:
            above, page = grown.pop()
            run = [page]
            while len(after := self._following.get(run[-1].key, [])) == 1:
                run += after
            tokens, medium = np.concatenate([one.tokens for one in run]), self._media[page.key]
            node = LowerNode(above.end, tokens, page.key.hex(), medium)
            (above.below if above is not top else roots).append(node)
            grown += [(node, one) for one in after]
        return roots[0]

    def _cut(self, node: Node, below: list[LowerNode]) -> None:
        """Cut a node into parts, so that other nodes can branch off inside it."""
        parts, start = list[LowerNode](), node.start
        for new in below:
            if new.start > start:
                tokens = node.tokens[start - node.start : new.start - node.start]
                parts.append(LowerNode(start, tokens, f"{node.serial}.{start}", node.medium))
                start = new.start
            parts[-1].below.append(new)
        following: list[LowerNode | Node] = [*parts[1:], node]
        for part, after in zip(parts, following, strict=True):
            part.below.insert(0, after)
        self._parts[node] = parts[0], start


def _page_ends(root: Node, page_size: int) -> dict[bytes, tuple[Node, int]]:
    """The node and position in which each page of the tree, and the empty prefix, ends, by the
    digest of all tokens up to there."""
    ends = {blake2b(digest_size=16).digest(): (root, 0)}
    nodes = [(root, blake2b(digest_size=16), root.tokens)]
    while nodes:
        node, digest, rest = nodes.pop()
        tokens, at = np.concatenate([rest, node.tokens]), 0
        while at + page_size <= len(tokens):
            digest.update(tokens[at : at + page_size].tobytes())
            at += page_size
            ends[digest.digest()] = node, node.end - len(tokens) + at
        nodes += [(child, digest.copy(), tokens[at:]) for child in node.children.values()]
    return ends
