"""How many pages leases hold: eviction cannot free these."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from radixcache.radix.eviction import EvictionOrder
from radixcache.radix.nodes import Node, RadixLease
from radixcache.radix.tree import RadixTree


class HeldPages:
    """The number of pages that leases hold, in the tree or alone. A reservation adds to it; after a
    lease was acquired, has moved or ended it is unknown, and counted again only when needed."""

    def __init__(
        self, tree: RadixTree, order: EvictionOrder, leases: Collection[RadixLease]
    ) -> None:
        self._tree = tree
        self._order = order
        self._leases = leases
        self._num = 0
        """The number, or a lower bound of it while `_is_counted` is false."""
        self._is_counted = True
        self._look: tuple[RadixLease, int, bool] | None = None
        """The last acquired lease, while nothing else has changed, and `_num` and `_is_counted`
        before it."""

    def add(self, count: int) -> None:
        """A lease has reserved `count` pages more."""
        self._num += count
        self._look = None

    def look(self, lease: RadixLease) -> None:
        """A lease was acquired, and holds the pages that it has found."""
        self._look = (lease, self._num, self._is_counted)
        if lease.num_tokens:
            self._is_counted = False

    def publish(self) -> None:
        """The last acquired lease is used, or moves."""
        self._look = None

    def forget(self) -> None:
        """Any change: leases may hold fewer pages than before."""
        self._num, self._is_counted, self._look = 0, False, None

    def release(self, lease: RadixLease) -> None:
        """A lease ends."""
        look = self._look
        self.forget()
        if look is not None and look[0] is lease:  # nothing has changed but for its look
            _, self._num, self._is_counted = look

    def can_evict(self, num_pages: int, most_held: int) -> bool:
        """Whether `num_pages` pages can be evicted: whether leases hold at most `most_held`."""
        if self._num > most_held or self._is_counted:
            return self._num <= most_held
        sure, page_size = 0, self._tree.page_size
        for leaf in islice(self._order, 8 * len(self._leases)):  # the count takes longer
            sure += leaf.num_pages - (leaf.start % page_size > 0)  # the first may be shared
            if sure >= num_pages:
                return True
        self._num, self._is_counted = self.count(), True
        return self._num <= most_held

    def count(self) -> int:
        """Distinct pages in the leases' tables, and those that the step in flight has yet to copy
        from: run by run, down to the deepest cursor in it or below. O(leases + runs above)."""
        tree, page_size, held = self._tree, self._tree.page_size, 0
        ends: dict[Node, int] = {}
        """The page table index at which a run's held pages end, by the run's first node."""

        def counts(node: Node | None, index: int, page: int) -> bool:
            """Whether `page` is counted at `index` on the way up from `node`."""
            while node is not None and node.end > index * page_size:
                first = node.run.nodes[0]
                if ends.get(first, 0) > index and node.page_at(index) == page:
                    return True
                node = first.parent
            return False

        for lease in self._leases:
            node, end = lease.node, -(-lease.num_tokens // page_size)
            while ends.get(first := node.run.nodes[0], -1) < end:
                is_new = first not in ends
                ends[first] = end
                if not is_new or first.parent is None:
                    break
                node = first.parent  # whose half-filled page the child may have copied
                end = -(-node.end // page_size) if tree.is_begun(first) else node.end // page_size
        for lease in self._leases:
            own = lease._num_own_from
            held += lease._num_pages - own
            if own * page_size < lease.num_tokens:
                held -= counts(lease.node, own, lease._table.item(own))
        for first, end in ends.items():
            index = first.first_page
            held += end - index
            if first.start % page_size and end > index:  # a run above may hold the first page, too
                held -= counts(first.parent, index, first.page_at(index))
        return held

    def check(self, held: int) -> None:
        """Assert that the count, as far as it is known, agrees with `held` pages."""
        assert self.count() == held, "held pages are miscounted"
        assert self._num == held if self._is_counted else self._num <= held, "out of date"
