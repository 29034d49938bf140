"""vLLM's first automatic prefix caching, of version 0.4."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import OutOfPages
from radixcache.lease import Lease, PageCopy
from radixcache.no_cache import NoCache
from radixcache.pages import PagePool
from radixcache.tokens import Tokens, TokensLike, as_tokens

Key = tuple[Hashable, bytes]
"""Namespace, and a hash of all tokens from the first to the block's last."""


class FirstBlocksLease(Lease):
    """A lease that knows its tokens, and the keys of its blocks.

    `keys` are those of the prompt's blocks, a half-filled one included, then of further full ones;
    `half` is the index of that half-filled one until the lease appends to it.
    """

    __slots__ = ("half", "keys", "tokens")
    half: int | None
    keys: list[Key]
    tokens: Tokens


class FirstBlocksCache(NoCache):
    """Blocks found by hash, as in vLLM 0.4.3.

    Rules (`CachedBlockAllocator`, `BlockSpaceManagerV1` and `LRUEvictor` of 0.4.3):

    - When it is admitted, a request takes all blocks of its prompt, each by the hash of all tokens
      up to its end; the half-filled last one is hashed, too. A block that has the hash is shared,
      in use or not. As many blocks must be free as the prompt has, those found in use included.
    - Leading blocks marked as computed are not computed again, but for the prompt's last one,
      full or not: that is always computed.
    - A step marks a request's full blocks but the last full one: the newest is found only when the
      next one is full. Requests of one step share blocks, but each computes them.
    - A request that appends to a shared half-filled block gets a copy. A full block is
      hashed by its whole content, and swapped for the block that has this hash, if there is one.
    - Unused blocks stay cached. Pages never used are taken first, then by last access; among ties,
      the block with most tokens up to its end. Blocks without a hash wait for their turn, too.

    Here the runtime's scheduler tells of decoded tokens when a request leaves, so their blocks are
    hashed and marked then; a half-filled block to which its only user appends has no hash until
    that leaves; and 1 % of the blocks that vLLM keeps free at admission is not kept. There is
    neither `rollback` nor `reset` nor `cached_length`: a replay needs none.
    """

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self.granularity = pool.page_size

    def _forget_all(self) -> None:
        super()._forget_all()
        num_pages = self.pool.num_pages
        self._pages: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_pages
        self._filled = np.zeros(num_pages, np.int32)
        self._computed = np.zeros(num_pages, bool)
        self._order = [(0, 0)] * num_pages
        """When a page was last used, and less the tokens up to its end."""
        self._idle: list[tuple[tuple[int, int], int]] = []
        """A heap of pages in the order in which they go; entries that are out of date are void."""
        self._num_idle = self._now = 0

    # The cache itself holds every page that it has taken from the pool; leases hold it besides.

    def _take(self, key: Key | None, filled: int, end: int) -> int:
        """The page of a key, or an empty one for it, with one more user."""
        page = None if key is None else self._pages.get(key)
        if page is None:
            if not self.pool.num_free:
                self.evict(1)
            page = self.pool.allocate(1).item()
            self._order[page] = (self._now, -end)
            self._num_idle += 1
            if key is not None:
                self._enter(page, key, filled)
        self._num_idle -= self.pool.refs.item(page) == 1
        self.pool.hold(page)
        return page

    def _leave(self, page: int) -> None:
        self.pool.refs[page] -= 1
        if self.pool.refs[page] == 1:
            self._num_idle += 1
            heapq.heappush(self._idle, (self._order[page], page))

    def _enter(self, page: int, key: Key, filled: int) -> None:
        self._pages[key], self._keys[page], self._filled[page] = page, key, filled

    def _forget(self, page: int) -> None:
        self._pages.pop(self._keys[page] or (None, b""), None)
        self._keys[page], self._filled[page], self._computed[page] = None, 0, False

    def evict(self, num_pages: int) -> int:
        count = left = min(num_pages, self._num_idle)
        while left:
            order, page = heapq.heappop(self._idle)
            if self.pool.refs[page] == 1 and self._order[page] == order:
                self.stats.evicted_pages += 1
                self.stats.evicted_tokens += self._filled.item(page)
                self._forget(page)
                self.pool.drop(np.array([page], np.int32))
                self._num_idle, left = self._num_idle - 1, left - 1
        return count

    def _hash(self, tokens: Tokens, namespace: Hashable, parent: bytes = b"") -> list[Key]:
        """The keys of the blocks of `tokens`, which follow the block `parent`. O(len(tokens))."""
        keys: list[Key] = []
        for start in range(0, len(tokens), self.page_size):
            block = tokens[start : start + self.page_size].tobytes()
            parent = blake2b(parent + block, digest_size=16).digest()
            keys.append((namespace, parent))
        return keys

    def _find(self, keys: list[Key]) -> list[Key]:
        """Those from the first on whose blocks are computed."""
        pages = (self._pages.get(key) for key in keys)
        found = [page is not None and bool(self._computed[page]) for page in pages]
        return keys[: [*found, False].index(False)]

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        return len(self._find(self._hash(as_tokens(tokens), namespace)[:-1])) * self.page_size

    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> FirstBlocksLease:
        lease = FirstBlocksLease(self.page_size, len(tokens), namespace, resumed)
        lease.tokens = tokens
        lease.keys = self._hash(lease.tokens, namespace)
        lease.half = len(tokens) // self.page_size if len(tokens) % self.page_size else None
        pages = [self._take(key, 0, 0) for key in self._find(lease.keys[:-1])]
        lease._set_pages(0, np.array(pages, np.int32))
        lease.capacity = lease.num_tokens = lease.cached_tokens = len(pages) * self.page_size
        return lease

    def reserve(self, lease: Any, num_tokens: int) -> None:
        self._mine(lease)
        refs, size = self.pool.refs, self.page_size
        prompt, have = lease.query_tokens, lease._num_pages
        blocks = -(-prompt // size)
        target = max(have, blocks, -(-num_tokens // size))
        half = lease.half if num_tokens > prompt else None
        available = self.pool.num_free + self._num_idle
        wanted = target - have + (half is not None and have > half and refs[lease._table[half]] > 2)
        if have < blocks:
            available += int(np.count_nonzero(refs[lease.page_table] == 2))  # found, and not in use
            wanted = target + (half is not None)
        if wanted > available:
            raise OutOfPages(f"{wanted} pages wanted, {available} free of {self.pool.num_pages}")
        pages = []
        for index in range(have, target):
            key = lease.keys[index] if index < blocks else None
            pages.append(self._take(key, min(size, prompt - index * size), (index + 1) * size))
        lease._set_pages(have, np.array(pages, np.int32))
        if half is not None:
            self._append_to(lease, half)
        lease.capacity = target * size if lease.half is None else prompt

    def _append_to(self, lease: FirstBlocksLease, half: int) -> None:
        """Make the prompt's half-filled block the lease's own: as it is, or as a copy."""
        page = lease._table.item(half)
        lease.half = None
        if self.pool.refs[page] == 2:
            self._forget(page)
            return
        copy = lease._table[half] = self._take(None, 0, (half + 1) * self.page_size)
        lease._copies.append(PageCopy(page, copy, lease.query_tokens % self.page_size))
        self._leave(page)
        self.stats.copied_pages += 1

    def publish(self, lease: Any, tokens: TokensLike, *, written: bool = False) -> None:
        super().publish(lease, tokens, written=written)
        size, known = self.page_size, len(lease.tokens)
        if lease.num_tokens > known:
            new = as_tokens(tokens)[known - lease.num_tokens :]
            lease.tokens = np.concatenate((lease.tokens, new))
        start, end = known // size, lease.num_tokens // size
        if start < end:
            parent = lease.keys[start - 1][1] if start else b""
            full = lease.tokens[start * size : end * size]
            lease.keys[start:] = self._hash(full, lease.namespace, parent)
        for index in range(start, end):
            key, page = lease.keys[index], lease._table.item(index)
            if key in self._pages:
                lease._table[index] = self._take(key, size, 0)
                self._leave(page)
            else:
                self._enter(page, key, size)
        if written:
            self._mark(lease)

    def _mark(self, lease: Lease) -> None:
        self._computed[lease.page_table[: max(0, lease.num_tokens // self.page_size - 1)]] = True

    def commit(self) -> None:
        for lease in self._in_flight:
            self._mark(lease)
        self._now += 1
        super().commit()

    def rollback(self) -> None:
        raise NotImplementedError("no step of a replay fails")

    def _release(self, lease: Any) -> None:
        size, prompt = self.page_size, lease.query_tokens
        for index, page in enumerate(lease.page_table.tolist()):
            end = (index + 1) * size
            key = lease.keys[index] if index < len(lease.keys) else None
            if lease.used:
                self._order[page] = (self._now, -end)
            if lease.num_tokens < min(end, prompt) and self.pool.refs[page] == 2:
                self._forget(page)  # it is not written
            elif self._keys[page] is None and key is not None and key not in self._pages:
                self._enter(page, key, prompt % size)  # half-filled, and found as that again
            self._leave(page)

    def filled_slots(self) -> NDArray[np.int32]:
        """[num_pages] slots that hold a token which a hash covers."""
        return self._filled.copy()

    def check(self) -> None:
        refs = (self.pool.refs > 0).astype(np.int32)
        for lease in self._leases:
            table = lease.page_table.tolist()
            assert lease.num_tokens <= lease.capacity and len(set(table)) == len(table)
            np.add.at(refs, lease.page_table, 1)
        self.pool.check(refs)
        assert {key: page for page, key in enumerate(self._keys) if key} == self._pages
        assert all(self._keys[page] for page in np.flatnonzero(self._computed)), "computed, no hash"
        idle = np.flatnonzero(self.pool.refs == 1).tolist()
        assert len(idle) == self._num_idle, "idle pages are miscounted"
        assert {(self._order[page], page) for page in idle} <= set(self._idle), "one is never freed"
