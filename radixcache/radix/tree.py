"""The token-exact radix tree: which pages hold the KV of which prefix.

A node is an edge: the tokens at positions [start, end) of every sequence that passes through it,
and the pages that cover them. Nodes split at any token, also in mid-page; then both halves
reference the page at the split. A path's page table is read from the root down: a child's first
page replaces its parent's last one where both cover the same positions.

The structure is that of SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104), with nodes
that end in mid-page instead of at page boundaries, and with their tokens in shared runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice

import numpy as np

from radixcache.base import as_namespace
from radixcache.lease import Lease
from radixcache.pages import PagePool, Pages
from radixcache.radix.nodes import NO_CHILDREN, Node, RadixLease, Run
from radixcache.snapshot import Ends, Outline
from radixcache.tokens import Tokens, common_length

MAX_RUNS = 4
"""So few runs on a path, the root's included, are not worth joining."""


class RadixTree:
    """The nodes of all namespaces and their holds on pages, without leases and eviction."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.roots: dict[Hashable, Node] = {}
        self.in_flight: dict[Node, int] = {}
        """Nodes that the step being scheduled writes to, each with the first position written."""
        self.postponed: list[Node] = []
        """Nodes that may be mergeable once nothing is in flight."""
        self._serial = 0
        self._namespaces: dict[Node, Hashable] = {}

    def find_root(self, namespace: Hashable) -> Node | None:
        """The namespace's root, if there is one; `InvalidRequest` if it is not hashable."""
        return self.roots.get(as_namespace(namespace))

    def look_up(self, tokens: Tokens, namespace: Hashable) -> tuple[Node | None, int]:
        """The node of the longest cached prefix of `tokens`, in flight or not, and its length."""
        root = self.find_root(namespace)
        return (None, 0) if root is None else self.descend(root, 0, tokens)

    def root(self, namespace: Hashable) -> Node:
        """The namespace's root, made if there is none."""
        namespace = as_namespace(namespace)
        root = self.roots.get(namespace)
        if root is None:
            empty = np.empty(0, np.int32)
            root = self.roots[namespace] = self._start_run(None, 0, empty, empty)
            self._namespaces[root] = namespace
        return root

    def written(self, node: Node) -> int:
        """The position in `node` up to which its KV is written; the rest is in flight."""
        return self.in_flight.get(node, node.end)

    def descend(self, node: Node, position: int, tokens: Tokens) -> tuple[Node, int]:
        """Follow `tokens` from a cursor as far as the tree holds them; returns the new cursor.

        O(len(tokens)) compared in bulk, plus one dictionary look-up and a bisection per run.
        """
        done, count = 0, len(tokens)
        while done < count:
            run = node.run
            offset = position - run.start
            length = min(run.nodes[-1].end - position, count - done)
            if length:
                same = common_length(
                    run.data[offset : offset + length], tokens[done : done + length]
                )
                position += same
                done += same
                if position > node.end:
                    node = run.nodes[run.index(position)]
                if done == count:
                    break
            if position < node.end:
                break
            child = node.children.get(tokens.item(done))
            if child is None:
                break
            node = child
        return node, position

    def climb(self, node: Node, position: int) -> Node:
        """The node on the way up from `node` that holds the token before `position`."""
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node

    def find_usable(self, root: Node, tokens: Tokens) -> tuple[Node, int, int, int]:
        """The node and length of the longest prefix that can be used, how much of it is written,
        and how many tokens longer it will be once the tokens in flight are written."""
        node, position = self.descend(root, 0, tokens)
        written = longest = position
        at = node
        while (start := self.written(at)) < min(written, at.end):
            written = start
            if start > at.start or at.parent is None:
                break
            at = at.parent
        if written < position:
            whole_pages = position // self.page_size * self.page_size
            position = max(written, whole_pages)
            node = self.climb(node, position)
        return node, position, written, longest - position

    def read_pages(self, node: Node, start: int, end: int) -> Pages:
        """Page table entries [start, end) of the path that ends in `node`. O(runs + pages)."""
        table = np.empty(end - start, np.int32)
        while end > start:
            run = node.run
            top = run.start // self.page_size
            first = max(top, start)
            if first < end:
                pages = run.data[run.room + first - top : run.room + end - top]
                table[first - start : end - start] = pages
                end = first
            parent = run.nodes[0].parent
            assert parent is not None or end <= start
            node = parent or node
        return table

    def path_tokens(self, node: Node) -> Tokens:
        """All tokens from the root to the end of `node`. O(path)."""
        parts = []
        at: Node | None = node
        while at is not None:
            parts.append(at.tokens)
            at = at.parent
        return np.concatenate(parts[::-1])

    def continuations(self, node: Node, position: int, count: int, branches: int) -> list[Tokens]:
        """Up to `branches` texts that follow `position`, up to `count` tokens of each; copies.

        Each branch at `position` gives one, newest first, along the newest where it forks again.
        If these are fewer, the forks on their ways give more. O(count * branches).
        """
        texts = list[Tokens]()
        waiting = deque([([node.tokens[position - node.start :][:count]], node)])
        if position == node.end and not node.children:
            return []
        while waiting and len(texts) < branches:
            parts, node = waiting.popleft()
            left = count - sum(map(len, parts))
            while left and node.children:
                room = branches - len(texts) - len(waiting)
                node, *others = islice(reversed(node.children.values()), room)
                waiting.extend(([*parts, other.tokens[:left]], other) for other in others)
                parts.append(node.tokens[:left])
                left -= len(parts[-1])
            texts.append(np.concatenate(parts))
        return texts

    def namespace_of(self, node: Node) -> Hashable:
        """The namespace that `node` belongs to. O(depth)."""
        while node.parent is not None:
            node = node.parent
        return self._namespaces[node]

    def drop_root(self, root: Node) -> None:
        """Forget an empty namespace, if that was not done before."""
        if root in self._namespaces:
            del self.roots[self._namespaces.pop(root)]

    def held_alone(self, node: Node, position: int, page: int) -> bool:
        """Whether only the path down to `node` holds `page`, the one with token `position - 1`.

        If `position` is the node's end, the slots from there on are then free to write.
        """
        holders = self.holders(node, (position - 1) // self.page_size, page)
        return self.pool.refs.item(page) == holders

    def holders(self, node: Node | None, index: int, page: int) -> int:
        """How many nodes on the path down to `node` hold `page` at `index` of the page table."""
        count = 0
        while node is not None and node.end > index * self.page_size:
            count += node.page_at(index) == page
            node = node.parent
        return count

    def add_child(self, parent: Node, tokens: Tokens, pages: Pages, room: int) -> Node:
        """A new leaf below `parent`, which takes over one hold on each of `pages`, with space to
        grow to `room` tokens."""
        leaf = self._start_run(parent, parent.end, tokens, pages, room)
        parent.adopt(leaf)
        leaf.last_use = parent.last_use
        return leaf

    def _start_run(
        self, parent: Node | None, start: int, tokens: Tokens, pages: Pages, room: int = 0
    ) -> Node:
        run = Run(start, tokens, pages, self.page_size, room)
        node = Node(parent, run, start, start + len(tokens))
        node.serial = self._next_serial()
        run.nodes = [node]  # `append` would make room for four
        return node

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` in two at `position`; returns the new upper half, `node` is the lower.

        Leases go with their cursors. A page that both halves cover gets a second hold. Moves no
        token: O(log nodes in the run + leases).
        """
        parent, run, page_size = node.parent, node.run, self.page_size
        assert parent is not None and node.start < position < node.end
        upper = Node(parent, run, node.start, position)
        if position % page_size:
            self.pool.hold(node.page_at(position // page_size))
        upper.serial = self._next_serial()
        upper.last_use = node.last_use
        written = self.written(node)
        if written < position:
            self.in_flight[upper] = written
            self.in_flight[node] = position
        parent.adopt(upper)
        run.nodes.insert(run.index(node.end), upper)
        node.start = position
        upper.adopt(node)
        for lease in [lease for lease in node.leases if lease.num_tokens <= position]:
            node.leave(lease)
            upper.enter(lease)
        return upper

    def mergeable(self, node: Node) -> Node | None:
        """The only child of `node`, if it can absorb `node` without any loss.

        It cannot while a lease stands in `node`, nor if `node` was used after its child, whose
        tokens would then look younger to eviction than they are; nor while the step in flight has
        yet to fill the child's copy of the page between them: that is tried again after the step.
        """
        if node.parent is None or node.leases or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        if node.last_use > child.last_use:
            return None
        index = child.first_page
        if self.is_begun(child) and child.page_at(index) != node.page_at(index):
            self.postponed.append(node)
            return None
        return child

    def is_begun(self, node: Node) -> bool:
        """Whether `node` begins in mid-page and is all in flight: the step may have yet to copy the
        tokens before it in its first page."""
        return node.start % self.page_size > 0 and self.written(node) == node.start

    def share_copies(self) -> bool:
        """Drop pages at branches that are not needed beside the copies that children have of them;
        returns whether any became free. O(nodes)."""
        before = self.pool.num_free
        for node in reversed([*self]):
            self._share_copy(node)
        return self.pool.num_free > before

    def _share_copy(self, node: Node) -> None:
        """Replace the half-filled last page of `node`, the last of its run, by a child's copy,
        unless a lease needs the page itself, or a copy of it is yet to be made."""
        run, index = node.run, node.end // self.page_size
        start = index * self.page_size
        if node.end == start or not node.children or node is not run.nodes[-1]:
            return
        page, holders = node.page_at(index), run.nodes[run.index(start + 1) :]
        below = [c for at in holders for c in at.children.values() if c.run is not run]
        if any(lease.num_tokens > start for at in holders for lease in at.leases):
            return
        if any(self.is_begun(child) for child in below):
            return
        run.set_page(index, below[-1].page_at(index))
        for _ in holders:
            self.pool.hold(node.page_at(index))
            self.pool.drop(np.array([page], np.int32))

    def merge(self, node: Node, child: Node) -> None:
        """Let `child`, which is `mergeable(node)`, absorb `node`.

        O(nodes in the run); O(len) if they are in two runs, as `node` moves to the child's.
        """
        parent, run = node.parent, node.run
        assert parent is not None
        kept = child.first_page - node.first_page
        if node.num_pages > kept:  # both hold the page at the boundary; keep the child's
            self.pool.drop(node.pages[kept:])
        written = self.in_flight.pop(node, node.end)
        if written < node.end:
            self.in_flight[child] = written
        if child.run is run:
            del run.nodes[run.index(node.end)]
        else:  # not the other way: earlier nodes may hold another page at the boundary
            child.run.prepend(node.tokens, node.pages[:kept])
            run.nodes.pop()
            if run.nodes:
                run.shrink()
        child.start = node.start
        parent.adopt(child)
        node.parent = None
        node.children = NO_CHILDREN

    def straighten(self, node: Node) -> None:
        """Join the runs of the path down to `node`, if branches have scattered it over many.

        Nodes that branch off begin runs of their own. Where a branch has copied the page in which
        it begins, two runs stay. O(runs), and O(path) if there are more than `MAX_RUNS`.
        """
        runs = [node.run]
        while (parent := runs[-1].nodes[0].parent) is not None:
            runs.append(parent.run)
        if len(runs) <= MAX_RUNS:
            return
        runs.pop()  # the root's
        above = runs.pop()
        while runs:
            run = runs.pop()
            parent = run.nodes[0].parent
            assert parent is not None
            half_filled = run.start % self.page_size > 0
            first, end = run.first_page, run.first_page + run.num_pages
            if half_filled and parent.page_at(first) != run.nodes[0].page_at(first):
                above = run
                continue
            above.cut(above.index(parent.end) + 1)
            above.append(run.data[: run.length], run.pages(first + half_filled, end))
            above.adopt(run.nodes)

    def remove(self, leaf: Node) -> Node:
        """Unlink a leaf whose pages are dropped already; returns its parent."""
        parent, run = leaf.parent, leaf.run
        assert parent is not None and not leaf.children and not leaf.leases
        parent.disown(leaf)
        run.nodes.pop()
        if run.nodes:
            run.shrink()
        parent.last_use = max(parent.last_use, leaf.last_use)
        return parent

    def outline(
        self,
        clock: int,
        leases: Iterable[RadixLease],
        pinned: Mapping[tuple[Hashable, str], Lease],
    ) -> Outline[Node]:
        """All nodes, with the hits of running `leases`, and the names that are `pinned`."""
        pins, running = dict[Node, list[str]](), dict[Node, list[int]]()
        for (_, name), lease in pinned.items():
            assert isinstance(lease, RadixLease)
            pins.setdefault(lease.node, []).append(name)
        for lease in {*leases}.difference(pinned.values()):
            running.setdefault(lease.node, []).append(lease.cached_tokens)

        return Outline(
            {namespace: root.children.values() for namespace, root in self.roots.items()},
            below=lambda node: node.children.values(),
            sizes=lambda nodes: [node.end - node.start for node in nodes],
            ages=lambda nodes: [clock - max(node.last_use, 0) for node in nodes],
            ends=lambda nodes: {
                at: Ends(running.get(node, ()), pins.get(node, ()))
                for at, node in enumerate(nodes)
                if node.leases
            },
            name=lambda node: str(node.serial),
            start=lambda node: node.start,
            tokens=lambda node: node.tokens,
        )

    def __iter__(self) -> Iterator[Node]:
        """All nodes, roots included, parents before their children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_node(self, node: Node) -> None:
        """Assert the invariants of one node, its links, and its place in its run."""
        run = node.run
        for first, child in node.children.items():
            assert child.parent is node and child.start == node.end, "broken link"
            assert child.first_token == first, "child under a wrong token"
        at = run.index(node.end)
        assert run.nodes[at] is node, "a node is not in its run"
        assert at == 0 or run.nodes[at - 1] is node.parent, "a run does not follow a path"
        assert node is not run.nodes[0] or node.start == run.start, "a run begins elsewhere"
        assert run.length <= run.room <= len(run.data) - run.num_pages
        if node.parent is None:
            assert node.start == node.end == node.num_pages == 0, "a root is empty"
            return
        assert node.start < node.end, "empty edge"
        assert node.start <= self.written(node) <= node.end, "written elsewhere"
        assert self.mergeable(node) is None, "a missed merge"
