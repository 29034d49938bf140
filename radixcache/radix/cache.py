"""The radix mode: hits of any length, at any page size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import cast

import numpy as np

from radixcache.base import PrefixCache, as_namespace, mutation
from radixcache.errors import LeaseError, OutOfPages
from radixcache.events import Evicted, Stored
from radixcache.lease import NO_PAGES, Lease, PageCopy
from radixcache.pages import PagePool, Pages
from radixcache.radix.eviction import EvictionOrder
from radixcache.radix.held_pages import HeldPages
from radixcache.radix.nodes import Node, RadixLease
from radixcache.radix.tree import RadixTree
from radixcache.snapshot import Outline
from radixcache.tokens import Tokens, TokensLike, as_tokens


class RadixCache(PrefixCache):
    """A token-exact radix tree over KV pages with LRU eviction of leaf tails.

    Args:
        pool: the pages to manage; this cache must be its only user. Pins may hold half of them.

    >>> cache = RadixCache(PagePool(num_pages=8, page_size=4))
    >>> lease = cache.acquire([1, 2, 3, 4, 5, 6])
    >>> cache.reserve(lease, 6)
    >>> cache.publish(lease, [1, 2, 3, 4, 5, 6])
    >>> cache.commit()
    >>> cache.release(lease)
    >>> cache.match([1, 2, 3, 4, 5, 9, 9])  # ends in the middle of the second page
    5
    """

    full_prompt_hits = True

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool, granularity=1)

    def _forget_all(self) -> None:
        self._tree = RadixTree(self.pool)
        self._order = EvictionOrder(self._tree)
        self._leases: dict[RadixLease, None] = {}
        self._held = HeldPages(self._tree, self._order, self._leases)
        self._in_flight: dict[RadixLease, int] = {}
        """Leases on in-flight tokens, in order, each with the length of its written prefix."""
        for tier in () if self.lower is None else self.lower.chain():
            tier.recover([])

    # -- look-ups ------------------------------------------------------------------------------

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        root = self._tree.find_root(namespace)
        return 0 if root is None else self._tree.find_usable(root, as_tokens(tokens)[:-1])[1]

    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return self.follow(tokens, namespace, 0)[0]

    def follow(
        self, tokens: TokensLike, namespace: Hashable = None, count: int = 1, branches: int = 1
    ) -> tuple[int, list[Tokens]]:
        """`cached_length`, and up to `branches` texts that are cached after that, up to `count`
        tokens of each: one for each branch there, newest first, which is followed along its newest
        where it forks again; if these are fewer, more from these forks. Changes nothing.
        O(len(tokens) + count * branches)."""
        node, end = self._tree.look_up(as_tokens(tokens), namespace)
        return end, [] if node is None else self._tree.continuations(node, end, count, branches)

    def find_pages(self, tokens: Tokens, namespace: Hashable) -> tuple[Pages, int]:
        node, end = self._tree.look_up(tokens, namespace)
        last = -(-end // self.page_size)
        return NO_PAGES if node is None else self._tree.read_pages(node, 0, last), end

    def next_prompts(self, count: int) -> Iterable[tuple[Tokens, Hashable]]:
        prompts = islice(self.coming(), count)
        return ((as_tokens(tokens), as_namespace(namespace)) for tokens, namespace in prompts)

    # -- the life of a lease -------------------------------------------------------------------

    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> RadixLease:
        root = self._tree.root(namespace)
        node, position, written, unusable = self._tree.find_usable(
            root, tokens if include_last else tokens[:-1]
        )
        if include_last and written < len(tokens):
            node, position, written, unusable = self._tree.find_usable(root, tokens[:-1])
        lease = RadixLease(node, self.page_size, len(tokens), namespace, resumed)
        lease.next_step_tokens = unusable
        node.enter(lease)
        if position:
            self._order.discard(node)
            lease.num_tokens = lease.cached_tokens = position
            self._read_table(lease, 0)
            if written < position:
                self._in_flight[lease] = written
        self._held.look(lease)
        return lease

    def _reserve(self, lease: RadixLease, num_tokens: int) -> None:
        page_size, position = self.page_size, lease.num_tokens
        have = lease._num_pages
        wanted = -(-num_tokens // page_size) - have
        boundary = position // page_size
        page = -1  # the half-filled page at the cursor, unless it is the lease's own: copy-on-write
        if boundary < lease._num_own_from:
            page = lease._table.item(boundary)
        copy = page >= 0 and not (
            position == lease.node.end and self._tree.held_alone(lease.node, position, page)
        )
        pages = self._allocate(wanted + copy, lease)
        if copy:
            lease._table[boundary] = pages[0]
            lease._copies.append(PageCopy(page, pages.item(0), position % page_size))
            self.stats.copied_pages += 1
        elif page >= 0:
            self.pool.hold(page)
            if self.windows is not None:  # other tokens may have stood behind the cursor
                self.windows.left.change(page)
        lease._num_own_from = min(lease._num_own_from, boundary)
        lease._set_pages(have, pages[1:] if copy else pages)
        lease.capacity = lease._num_pages * page_size

    def _publish(self, lease: RadixLease, tokens: Tokens, written: bool) -> None:
        if not written:
            self._in_flight.setdefault(lease, lease.num_tokens)
            lease.publishing = True
        if self._extend(lease, tokens, written):
            self._count(lease)

    @mutation
    def load(self, lease: Lease, tokens: TokensLike) -> None:
        """Lengthen the hit of `lease` by `tokens`, whose KV was copied into its reserved pages from
        a lower tier, whole pages, before its first `publish`. Nothing changes if another lease has
        the same tokens in flight, as `lease.num_tokens` then says. O(len(tokens)).
        """
        lease, tokens = cast(RadixLease, self._mine(lease)), as_tokens(tokens)
        if lease.used:
            raise LeaseError("a hit is lengthened before the first publish")
        lease._check_publish(len(tokens))
        before = lease.num_tokens
        if self._extend(lease, tokens, written=True):
            lease._copies.clear()  # the page has its tokens; the one that had them may be evicted
            lease.cached_tokens = lease.num_tokens
            self.stats.loaded_tokens += lease.num_tokens - before
            self._note_use(lease)
            self._settle(lease.node)

    def _touch(self, lease: RadixLease) -> None:
        self._held.publish()

    def _extend(self, lease: RadixLease, tokens: Tokens, written: bool) -> bool:
        """Move the cursor over `tokens`, and store those that the tree does not hold; False if they
        are written, but in flight for another lease."""
        start = lease.num_tokens
        node, position = self._tree.descend(lease.node, start, tokens)
        if written and self._tree.written(node) < position:
            return False
        self._held.publish()
        if position > start:
            self._held.forget()
            self._move(lease, node, position)
            self._drop_duplicates(lease)
            if lease._copies and self._tree.written(node) >= position:
                # From the page that the lease pins now: the other one may go before the step.
                at = lease._num_own_from
                page = self._tree.read_pages(node, at, at + 1).item(0)
                lease._copies = [copy._replace(source=page) for copy in lease._copies]
        if position < start + len(tokens):
            self._append(lease, tokens[position - start :], written)
        return True

    def _drop_duplicates(self, lease: RadixLease) -> None:
        """Free the lease's own whole pages before its cursor: the tree has these tokens, too."""
        first, end = lease._num_own_from, lease.num_tokens // self.page_size
        if first < end:
            own = lease._table[first:end].copy()
            lease._table[first:end] = self._tree.read_pages(lease.node, first, end)
            lease._num_own_from = end
            self.pool.drop(own)
            if lease._copies:  # one may be into a page that is free now
                lease._copies = [copy for copy in lease._copies if self.pool.refs[copy.target]]

    def _append(self, lease: RadixLease, tokens: Tokens, written: bool) -> None:
        """Store tokens, which the tree does not hold, below the lease's cursor in its own pages."""
        tree, page_size = self._tree, self.page_size
        node, position = lease.node, lease.num_tokens
        if position < node.end:
            node = self._split(node, position)
        end = position + len(tokens)
        table = lease._table
        first, last = position // page_size, (end - 1) // page_size
        half_filled = position % page_size > 0
        in_place = (
            node.parent is not None
            and not node.children
            and (not half_filled or node.page_at(first) == table[first])
        )
        # The tree takes over the lease's hold on each full page. Of a last page that is not full,
        # it gets a hold of its own, since the lease goes on writing there.
        new_first = first + (in_place and half_filled)
        if end % page_size and last >= new_first:
            self.pool.hold(table.item(last))
        if new_first > first and end // page_size > first:
            self.pool.drop(table[first:new_first])
        lease._num_own_from = end // page_size
        pages = table[new_first : last + 1]
        if in_place:
            node.extend(tokens, pages)
        else:
            node = tree.add_child(node, tokens, pages, lease.query_tokens - position)
            self._held.forget()  # the lease may have copied the page before
        if not written:
            tree.in_flight.setdefault(node, position)
        self._move(lease, node, end)
        self._emit_about(Stored, node, position)

    def _end_step(self) -> None:
        super()._end_step()
        tree, self._order.wants = self._tree, None
        if tree.in_flight:
            self._held.forget()
        tree.in_flight.clear()
        if tree.postponed:
            postponed, tree.postponed = tree.postponed, []
            for node in postponed:
                self._settle(node)

    @mutation
    def rollback(self) -> None:
        tree = self._tree
        self._held.forget()
        doomed: set[Node] = set()
        for lease in self._in_flight:
            node = lease.node
            while tree.written(node) < node.end and node not in doomed:
                doomed.add(node)
                assert node.parent is not None
                node = node.parent
        unsettled = []
        for lease, written in self._in_flight.items():
            unsettled.append(lease.node)
            lease._drop_own(self.pool)
            lease._copies.clear()
            lease.num_tokens = min(lease.num_tokens, written)
            lease.cached_tokens = min(lease.cached_tokens, written)
            lease.node.leave(lease)
            tree.climb(lease.node, lease.num_tokens).enter(lease)
            self._read_table(lease, lease.num_tokens // self.page_size)
        leaves_first = sorted(doomed, key=lambda node: (-node.start, node.serial))
        unsettled += [self._cut(node, tree.written(node)) for node in leaves_first]
        self._end_step()
        for node in unsettled:
            self._settle(node)

    def _release(self, lease: RadixLease) -> None:
        self._held.release(lease)
        lease._drop_own(self.pool)
        if lease.used or lease.ended:
            self._note_use(lease)
        lease.node.leave(lease)
        self._settle(lease.node)

    def _discard(self, lease: RadixLease) -> None:
        node = lease.node
        while node.parent is not None and not node.children:
            end = max((other.num_tokens for other in node.leases), default=node.start)
            if end == node.end:
                break
            node = self._cut(node, end)
        self._settle(node)

    def _cut(self, leaf: Node, end: int) -> Node:
        """Forget what a leaf holds from position `end` on; returns the node that ends there."""
        self._emit_about(Evicted, leaf, end)
        if end > leaf.start:
            self.pool.drop(leaf.truncate(end))
            return leaf
        self.pool.drop(leaf.pages)
        self._order.discard(leaf)
        return self._tree.remove(leaf)

    def _note_use(self, lease: RadixLease) -> None:
        """The tokens up to the lease's cursor have been used last."""
        self.clock += 1
        if (node := lease.node).parent is not None:
            if lease.num_tokens < node.end:  # the tail was not used: it keeps its time
                node = self._split(node, lease.num_tokens)
            self._tree.straighten(node)
            if lease.ended and not node.children:
                others = (other.num_tokens for other in node.leases if other is not lease)
                end = max(others, default=node.start)
                if node.start < end < node.end:
                    self._split(node, end)
                if end < node.end and node.parent:
                    node.last_use, node = -1, node.parent
            node.last_use = self.clock
            if node is not lease.node:
                self._settle(node)

    # -- eviction ------------------------------------------------------------------------------

    def _evict(self, num_pages: int) -> int:
        """Least recently used leaves first, each from its tail. O(log n) a leaf, O(1) a page."""
        end_free, before = self.pool.num_free + num_pages, self.pool.num_free
        while (missing := end_free - self.pool.num_free) > 0:
            victim = self._order.victim(self.next_prompts)
            age = None if victim is None else victim[0].last_use
            if self.windows is not None and self.windows.evict(age):
                continue
            if victim is None:
                if not self._expose_tails() and not self._tree.share_copies():
                    break
                continue
            leaf, least = victim
            kept = max(least, leaf.num_pages - missing)
            end = (leaf.first_page + kept) * self.page_size if kept else leaf.start
            self.stats.evicted_tokens += leaf.end - end
            self._emit_about(Evicted, leaf, end)
            if self.lower is not None and self._tree.namespace_of(leaf) is None:
                path = self._tree.path_tokens(leaf)
                self.lower.demote(path, leaf.first_page + kept, leaf.pages[kept:])
            if kept:
                self.pool.drop(leaf.truncate(end))
            else:
                self.pool.drop(leaf.pages)
                self._order.discard(leaf)
                self._settle(self._tree.remove(leaf))  # a merge frees a page, too
        freed = self.pool.num_free - before
        self.changes += 1
        self.stats.evicted_pages += freed
        return freed

    def take_pages(self, count: int) -> Pages:
        return self._allocate(count, None)

    def _allocate(self, count: int, lease: RadixLease | None) -> Pages:
        """`count` pages, by eviction if needed; raises `OutOfPages` before it evicts any."""
        missing = count - self.pool.num_free
        if missing > 0:
            most_held = self.pool.num_pages - count
            most_held -= 0 if self.windows is None else self.windows.num_running
            if not self._held.can_evict(missing, most_held):
                raise OutOfPages(
                    f"{count} pages wanted, {self.pool.num_free} free of {self.pool.num_pages}, "
                    f"not enough evictable"
                )
            if lease and lease.node.parent is not None and lease.num_tokens < lease.node.end:
                self._split(lease.node, lease.num_tokens)  # the rest can be evicted in its turn
                missing = count - self.pool.num_free
            self._evict(missing)
        if lease is not None:
            self._held.add(count)
        return self.pool.allocate(count)

    def _expose_tails(self) -> bool:
        """Split each leased leaf behind its last cursor, so that the rest can be evicted; returns
        whether there was a rest."""
        exposed = False
        for lease in list(self._leases):
            node = lease.node
            if not node.children:
                last = max(other.num_tokens for other in node.leases)
                if last < node.end and node.parent is not None:
                    self._split(node, last)
                    exposed = True
        return exposed

    def _split(self, node: Node, position: int) -> Node:
        """Split a leased node, whose lower half may now be evictable; returns the upper half."""
        upper = self._tree.split(node, position)
        self._settle(node)
        return upper

    def _settle(self, node: Node) -> None:
        """Restore the invariants around a node that lost a child or a lease, or was used.

        A leaf without a lease is evictable, an empty namespace goes, an only child merges with its
        parent.
        """
        if not node.children and not node.leases:
            if node.parent is not None:
                self._order.add(node)
            else:
                self._tree.drop_root(node)
        above = node.parent
        self._merge(node)
        while above is not None and len(above.children) == 1:
            node, above = above, above.parent
            self._merge(node)

    def _merge(self, node: Node) -> None:
        if (child := self._tree.mergeable(node)) is not None:
            self._order.note_merge(node, child)
            self._tree.merge(node, child)

    # -- cursors and tables --------------------------------------------------------------------

    def _move(self, lease: RadixLease, node: Node, position: int) -> None:
        """Move the cursor of a lease, which now pins `node`."""
        lease.num_tokens = position
        if node is not lease.node:
            self._order.discard(node)
            before = lease.node
            node.enter(lease)
            before.leave(lease)
            if not before.leases:
                self._settle(before)

    def _read_table(self, lease: RadixLease, start: int) -> None:
        """Read the lease's page table from the tree, from index `start` up to the cursor."""
        end = -(-lease.num_tokens // self.page_size)
        lease._set_pages(start, self._tree.read_pages(lease.node, start, end))
        lease._num_own_from = end
        lease.capacity = lease.num_tokens

    def _pin(self, lease: RadixLease) -> None:
        self._held.forget()
        if lease.num_tokens < lease.node.end:  # what follows the prefix stays evictable
            self._split(lease.node, lease.num_tokens)

    # -- the whole -----------------------------------------------------------------------------

    def outline(self) -> Outline[Node]:
        return self._tree.outline(self.clock, self._leases, self.pins.leases)

    def _forget_cached(self) -> None:
        for node in self._tree:
            self.pool.drop(node.pages)
        if self.lower is not None:
            self.lower.clear()
        self._forget_all()

    def _emit_about(self, kind: type[Stored] | type[Evicted], node: Node, start: int) -> None:
        """Send an event about positions [start, end) of `node`. O(path), if there are listeners."""
        if self.events:
            self._emit(kind(self._tree.namespace_of(node), self._tree.path_tokens(node), start))

    def check(self) -> None:
        refs = np.zeros(self.pool.num_pages, np.int32)
        held = np.zeros(self.pool.num_pages, bool)
        evictable = 0
        for node in self._tree:
            self._tree.check_node(node)
            if node.parent is not None and self._tree.is_begun(node):
                held[node.parent.page_at(node.first_page)] = True
            np.add.at(refs, node.pages, 1)
            for lease in node.leases:
                assert lease.node is node and lease in self._leases, f"{lease} strayed"
            is_evictable = not node.children and not node.leases and node.parent is not None
            assert is_evictable == (node.place is not None), "eviction order and tree disagree"
            evictable += is_evictable
        assert len(self._order) == evictable, "the eviction order holds nodes not in the tree"
        self._order.check()
        for lease in self._leases:
            self._check_lease(lease)
            own = lease._table[lease._num_own_from : lease._num_pages]
            np.add.at(refs, own, 1)
            pages = -(-lease.num_tokens // self.page_size)
            held[own] = held[self._tree.read_pages(lease.node, 0, pages)] = True
        self._held.check(int(held.sum()))
        if self.lower is not None:
            self.lower.check()
        assert self._in_flight.keys() <= self._leases.keys()
        assert self._tree.in_flight.keys() <= set(self._tree), "a node in flight has gone"
        assert self._in_flight or not self._tree.in_flight, "in flight for nobody"
        self.pool.check(refs + self._count_windows())

    def _check_lease(self, lease: RadixLease) -> None:
        node, position, page_size = lease.node, lease.num_tokens, self.page_size
        assert lease in node.leases and not lease.released
        assert node.start < position <= node.end or (node.parent is None and position == 0)
        boundary, pages, own = position // page_size, -(-position // page_size), lease._num_own_from
        assert own == boundary or own == lease._num_pages == pages, f"{lease}: own pages from {own}"
        shared = self._tree.read_pages(node, 0, min(own, pages))
        assert np.array_equal(lease._table[: len(shared)], shared), f"{lease}: stale page table"
        reserved = lease._num_pages * page_size if own == boundary else position
        assert lease.capacity == reserved, f"{lease}: capacity {lease.capacity}, not {reserved}"
