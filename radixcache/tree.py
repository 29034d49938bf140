"""The token-exact radix tree: which pages hold the KV of which prefix.

A node is an edge: the tokens at positions [start, end) of every sequence that passes through it,
and the pages that cover them. Nodes split at any token, also in mid-page; then both halves
reference the page at the split, and a path's page table is read from the root down, a child's
first page standing for its parent's last one where they cover the same positions.

The structure is that of SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104), with nodes
that end in mid-page instead of at page boundaries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixcache.pages import PagePool, Pages

if TYPE_CHECKING:
    from radixcache.radix import RadixLease

Tokens = NDArray[np.int32]

NO_STEP = -1


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two equally long, non-empty arrays. O(n), vectorised."""
    different = a != b
    first = int(different.argmax())
    return first if different[first] else len(a)


class Node:
    """An edge of the tree and the pages of its tokens; a root is the empty edge [0, 0).

    Tokens and pages live in buffers with spare room, so that a growing sequence extends its leaf
    in place, amortised O(1) per token.
    """

    __slots__ = (
        "_pages",
        "_tokens",
        "children",
        "created",
        "end",
        "first_page",
        "last_use",
        "leases",
        "num_pages",
        "parent",
        "priority",
        "serial",
        "start",
        "step",
        "uses",
        "written",
    )

    def __init__(
        self, parent: Node | None, start: int, tokens: Tokens, first_page: int, pages: Pages
    ) -> None:
        self.parent = parent
        self.children: dict[int, Node] = {}
        """Children by their first token."""
        self.start = start
        self.end = start + len(tokens)
        self.first_page = first_page
        """Index in the page table of `pages[0]`: start // page_size."""
        self.num_pages = len(pages)
        self._tokens = tokens
        self._pages = pages
        self.step = NO_STEP
        """The step that wrote to this node last."""
        self.written = 0
        """While that step is in flight: positions below this one are written."""
        self.last_use = 0
        self.created = 0
        self.uses = 0
        self.priority = 0
        self.serial = 0
        self.leases: set[RadixLease] = set()
        """Leases whose cursor is in this node: start < lease.num_tokens <= end."""

    @property
    def tokens(self) -> Tokens:
        """[end - start] the edge's tokens; a view."""
        return self._tokens[: self.end - self.start]

    @property
    def pages(self) -> Pages:
        """[num_pages] the pages that cover the edge; a view."""
        return self._pages[: self.num_pages]

    def page_at(self, index: int) -> int:
        """The page that this node holds at `index` of the page table."""
        return int(self._pages[index - self.first_page])

    def extend(self, tokens: Tokens, pages: Pages) -> None:
        """Append to the edge. Amortised O(len)."""
        length = self.end - self.start
        self._tokens = _with_room(self._tokens, length, len(tokens))
        self._tokens[length : length + len(tokens)] = tokens
        self.end += len(tokens)
        if len(pages):
            self._pages = _with_room(self._pages, self.num_pages, len(pages))
            self._pages[self.num_pages : self.num_pages + len(pages)] = pages
            self.num_pages += len(pages)

    def truncate(self, end: int, num_pages: int) -> Pages:
        """Cut the edge to end at `end` with `num_pages` pages; returns the pages cut off."""
        cut = self._pages[num_pages : self.num_pages].copy()
        self.end = end
        self.num_pages = num_pages
        length = end - self.start
        if length < len(self._tokens) // 2:  # give the memory back; halving keeps it amortised
            self._tokens = self._tokens[:length].copy()
            self._pages = self._pages[:num_pages].copy()
        return cut


def _with_room(buffer: NDArray[np.int32], used: int, count: int) -> NDArray[np.int32]:
    if used + count <= len(buffer):
        return buffer
    grown = np.empty((used + count) * 5 // 4 + 4, np.int32)
    grown[:used] = buffer[:used]
    return grown


class RadixTree:
    """The nodes of all namespaces, and their holds on pages; leases and eviction live elsewhere."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.roots: dict[Hashable, Node] = {}
        self.step = 0
        """Number of the step being scheduled; what it writes is in flight."""
        self.postponed: list[Node] = []
        """Nodes that may be mergeable once nothing is in flight."""
        self._serial = 0
        self._namespaces: dict[Node, Hashable] = {}

    def root(self, namespace: Hashable) -> Node:
        """The namespace's root, made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            empty = np.empty(0, np.int32)
            root = self.roots[namespace] = Node(None, 0, empty, 0, empty)
            self._namespaces[root] = namespace
        return root

    def written(self, node: Node) -> int:
        """Positions of `node` below this one hold written KV; those from it on are in flight."""
        return min(node.written, node.end) if node.step == self.step else node.end

    def descend(self, node: Node, position: int, tokens: Tokens) -> tuple[Node, int]:
        """Follow `tokens` from a cursor as far as the tree holds them; returns the new cursor.

        O(len(tokens)) compared in bulk, plus one dictionary look-up per node.
        """
        done, count = 0, len(tokens)
        while done < count:
            if position == node.end:
                child = node.children.get(tokens.item(done))
                if child is None:
                    break
                node = child
            offset = position - node.start
            length = min(node.end - position, count - done)
            same = common_length(
                node._tokens[offset : offset + length], tokens[done : done + length]
            )
            position += same
            done += same
            if same < length:
                break
        return node, position

    def climb(self, node: Node, position: int) -> Node:
        """The node on the way up from `node` that holds the token before `position`."""
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node

    def read_pages(self, node: Node, start: int, end: int) -> Pages:
        """Page table entries [start, end) of the path that ends in `node`. O(nodes + pages)."""
        table = np.empty(end - start, np.int32)
        while end > start:
            first = max(node.first_page, start)
            if first < end:
                low = first - node.first_page
                table[first - start : end - start] = node._pages[low : low + end - first]
                end = first
            assert node.parent is not None or end <= start
            node = node.parent or node
        return table

    def path_tokens(self, node: Node) -> Tokens:
        """All tokens from the root to the end of `node`. O(path)."""
        parts = []
        at: Node | None = node
        while at is not None:
            parts.append(at.tokens)
            at = at.parent
        return np.concatenate(parts[::-1])

    def namespace_of(self, node: Node) -> Hashable:
        """The namespace that `node` belongs to. O(depth)."""
        while node.parent is not None:
            node = node.parent
        return self._namespaces[node]

    def drop_root(self, root: Node) -> None:
        """Forget a namespace that holds nothing."""
        del self.roots[self._namespaces.pop(root)]

    def held_alone(self, node: Node, position: int, page: int) -> bool:
        """Whether nothing but the path down to `node` uses `page`, which holds `position - 1`.

        Then its slots from `position` on are free to write, if `position` is the node's end.
        """
        index = (position - 1) // self.page_size
        holders = 0
        at: Node | None = node
        while at is not None and at.end > index * self.page_size:
            holders += at.page_at(index) == page
            at = at.parent
        return int(self.pool.refs[page]) == holders

    def add_child(self, parent: Node, tokens: Tokens, pages: Pages) -> Node:
        """A new leaf below `parent`, which takes over one hold on each of `pages`."""
        leaf = Node(parent, parent.end, tokens, parent.end // self.page_size, pages)
        parent.children[tokens.item(0)] = leaf
        self._serial += 1
        leaf.serial = leaf.created = self._serial
        leaf.last_use = parent.last_use
        return leaf

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` in two at `position`; returns the new upper half, `node` is the lower. O(len).

        Leases go with their cursors. A page that both halves cover gets a second hold.
        """
        assert node.parent is not None and node.start < position < node.end
        page_size = self.page_size
        cut = position - node.start
        upper_pages = (position - 1) // page_size + 1 - node.first_page
        lower_first = position // page_size
        upper = Node(
            node.parent,
            node.start,
            node._tokens[:cut].copy(),
            node.first_page,
            node._pages[:upper_pages].copy(),
        )
        if position % page_size:
            self.pool.hold(node.page_at(lower_first))
        self._serial += 1
        upper.serial = self._serial
        upper.last_use = node.last_use
        upper.created = node.created
        upper.uses = node.uses
        upper.priority = node.priority
        upper.step = node.step
        upper.written = min(node.written, position)
        upper.children[node._tokens.item(cut)] = node
        node.parent.children[node._tokens.item(0)] = upper
        node._pages = node._pages[lower_first - node.first_page : node.num_pages].copy()
        node._tokens = node._tokens[cut : node.end - node.start].copy()
        node.num_pages = len(node._pages)
        node.parent = upper
        node.start = position
        node.first_page = lower_first
        node.written = max(node.written, position)
        if node.leases:
            upper.leases = {lease for lease in node.leases if lease.num_tokens <= position}
            node.leases -= upper.leases
            for lease in upper.leases:
                lease.node = upper
        return upper

    def mergeable(self, node: Node) -> Node | None:
        """The only child of `node`, if it may absorb it without any loss.

        Not while a lease stands in `node`, nor when `node` was used after its child, whose tokens
        would then look younger to eviction than they are. Nor while the child has a copy of the
        half-filled page between them that the step in flight has yet to fill: look again then.
        """
        if node.parent is None or node.leases or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        if node.last_use > child.last_use:
            return None
        if (
            child.start % self.page_size
            and child.page_at(child.first_page) != node.page_at(child.first_page)
            and self.written(child) < child.end
        ):
            self.postponed.append(node)
            return None
        return child

    def merge(self, node: Node, child: Node) -> None:
        """Let `child`, which is `mergeable(node)`, absorb `node`. O(len)."""
        assert node.parent is not None
        kept = child.first_page - node.first_page
        if node.num_pages > kept:  # both cover the page at the boundary; the child's stands
            self.pool.drop(node.pages[kept:])
        written = self.written(node)
        if written == node.end:
            written = self.written(child)
        if written < child.end:
            child.step, child.written = self.step, written
        child._tokens = np.concatenate((node.tokens, child.tokens))
        child._pages = np.concatenate((node.pages[:kept], child.pages))
        child.num_pages = len(child._pages)
        child.created = node.created
        child.uses += node.uses
        child.priority = max(node.priority, child.priority)
        child.start = node.start
        child.first_page = node.first_page
        child.parent = node.parent
        node.parent.children[child._tokens.item(0)] = child
        node.parent = None
        node.children = {}

    def remove(self, leaf: Node) -> Node:
        """Unlink a leaf whose pages are dropped already; returns its parent."""
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.leases
        del parent.children[leaf._tokens.item(0)]
        parent.last_use = max(parent.last_use, leaf.last_use)
        parent.uses += leaf.uses
        parent.priority = max(parent.priority, leaf.priority)
        leaf.parent = None
        return parent

    def __contains__(self, root: Node) -> bool:
        return root in self._namespaces

    def __iter__(self) -> Iterator[Node]:
        """All nodes, roots included, parents before their children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_node(self, node: Node) -> None:
        """Assert the invariants of one node and its links."""
        page_size = self.page_size
        for first, child in node.children.items():
            assert child.parent is node and child.start == node.end, "broken link"
            assert child._tokens.item(0) == first, "child under a wrong token"
        if node.parent is None:
            assert node.start == node.end == node.num_pages == 0, "a root is empty"
            return
        assert node.start < node.end, "empty edge"
        assert node.first_page == node.start // page_size
        assert node.num_pages == (node.end - 1) // page_size + 1 - node.first_page
        assert len(node._tokens) >= node.end - node.start and len(node._pages) >= node.num_pages
        assert self.mergeable(node) is None, "a missed merge"
