"""The hash-block mode: vLLM 0.33's automatic prefix caching, behind the same interface."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from radixcache.base import PrefixCache, mutation
from radixcache.errors import InvalidRequest, OutOfPages
from radixcache.hash_block.blocks import (
    Block,
    BlockEvicted,
    BlockMap,
    BlockRows,
    BlocksStored,
    PromptHashes,
    Row,
)
from radixcache.hash_block.free_queue import FreeQueue
from radixcache.hash_block.hashes import as_block_namespace, first_parent, hash_block
from radixcache.lease import Lease
from radixcache.pages import PagePool, Pages
from radixcache.snapshot import Ends, Outline
from radixcache.tokens import Tokens, TokensLike, as_tokens

_NO_TOKENS: Tokens = np.empty(0, np.int32)


class BlockLease(Lease):
    """A lease over an append-only table of blocks, full but for the last used one."""

    __slots__ = ("block", "tail", "uses")

    def __init__(
        self, page_size: int, query_tokens: int, namespace: Hashable, resumed: bool
    ) -> None:
        super().__init__(page_size, query_tokens, namespace, resumed)
        self.block: Block | None = None
        """The last full block that the lease found or published."""
        self.tail = _NO_TOKENS
        """The published tokens after it."""
        self.uses = False
        """Its pages are in use, and have left the free queue."""


class HashBlockCache(PrefixCache):
    """Whole blocks under the hash of their prefix, evicted lazily from a free queue.

    Behaves as vLLM 0.33 does with one full-attention group, page numbers and queue order included;
    `bench/peers/conformance` compares the two after every operation. A block is a page.

    - Tables are append-only: where the same block exists already, both stay (`Stored` tells of
      each), and the one published first is found.
    - Release goes through a lease's pages in reverse: those without a full block to the head of the
      free queue, the others to its tail. Pages come from the head, and only then is what they hold
      forgotten. So **a page that is cached and not in use is free**: `pool.num_free` counts it,
      `pool.refs` does not. `evict` makes such pages forget where they stand.
    - A block whose predecessor was evicted stays, but cannot be found before that is back.
    - Page 0 is never used (vLLM's null block), so a pool of n pages holds n - 1.
    - Pages that `acquire` has found keep their place in the free queue until the first `reserve`
      that adds pages, as in vLLM until the allocation.

    Args:
        pool: the pages to manage, all free; this cache must be its only user. Pins may hold half
            of them.

    >>> cache = HashBlockCache(PagePool(num_pages=8, page_size=4))
    >>> lease = cache.acquire([1, 2, 3, 4, 5, 6])
    >>> cache.reserve(lease, 6)
    >>> cache.publish(lease, [1, 2, 3, 4, 5, 6])
    >>> cache.commit()
    >>> cache.release(lease)
    >>> cache.match([1, 2, 3, 4, 5, 9, 9])  # whole blocks only
    4
    >>> cache.queue  # the half-filled page goes first, the full one last
    [2, 3, 4, 5, 6, 7, 1]
    """

    def __init__(self, pool: PagePool) -> None:
        if pool.num_free < pool.num_pages:
            raise InvalidRequest("the hash-block cache needs a pool of its own, all pages free")
        if pool.num_pages < 2:
            raise InvalidRequest("hash-block caching never uses page 0: one page is not enough")
        self._first_parent = first_parent()
        super().__init__(pool, granularity=pool.page_size)

    def _forget_all(self) -> None:
        pool = self.pool
        self._queue = FreeQueue(pool.refs)
        pool.free = self._queue
        pool.allocate(1)
        self._looking: NDArray[np.int32] = np.zeros(pool.num_pages, np.int32)
        """[num_pages] the holders in `pool.refs` that do not use the page."""
        self._blocks: list[Block | None] = [None] * pool.num_pages
        """The block that each page has cached."""
        self._last_use: NDArray[np.int64] = np.zeros(pool.num_pages, np.int64)
        """When each page in the queue was last used, by `clock`."""
        self._map = BlockMap()
        self._hashes = PromptHashes()
        self._leases: dict[BlockLease, None] = {}
        self._in_flight: dict[BlockLease, tuple[int, Tokens]] = {}
        """Leases on in-flight tokens, in order, each with the length and the tail to which a failed
        step takes it back."""
        self._published: dict[int, None] = {}
        """Pages whose block is in flight, in order of publication."""

    @property
    def queue(self) -> list[int]:
        """The free queue: pages in the order in which they will be used and forgotten. O(n)."""
        return list(self._queue)

    # -- look-ups ------------------------------------------------------------------------------

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        tokens = as_tokens(tokens)
        return len(self._find(tokens, namespace, len(tokens) - 1)) * self.page_size

    def cached_length(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        tokens = as_tokens(tokens)
        return len(self._find(tokens, namespace, len(tokens))) * self.page_size

    def find_pages(self, tokens: Tokens, namespace: Hashable) -> tuple[Pages, int]:
        pages = self._find(tokens, namespace, len(tokens))
        return np.array(pages, np.int32), len(pages) * self.page_size

    def _find(self, tokens: Tokens, namespace: Hashable, most: int) -> list[int]:
        """Pages of the longest cached prefix of at most `most` tokens. O(len(tokens))."""
        keys = as_block_namespace(namespace)
        pages: list[int] = []
        size = self.page_size
        if most < size:
            return pages
        hashes = self._hashes.of(tokens, namespace)
        for index in range(most // size):
            if index == len(hashes):
                start, end = index * size, index * size + size
                parent = hashes[-1] if hashes else self._first_parent
                extra = None if keys is None else keys.keys(start, end)
                hashes.append(hash_block((parent, tuple(tokens[start:end].tolist()), extra)))
            page = self._map.get(hashes[index])
            if page is None:
                break
            pages.append(page)
        return pages

    # -- the life of a lease -------------------------------------------------------------------

    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> BlockLease:
        """vLLM always computes the last token: there is no `include_last`."""
        pages = self._find(tokens, namespace, len(tokens) - (not include_last))
        lease = BlockLease(self.page_size, len(tokens), namespace, resumed)
        self._hold(lease, pages)
        lease.cached_tokens = lease.num_tokens
        for index, page in enumerate(pages if self._published else ()):
            if page in self._published:
                self._in_flight[lease] = index * self.page_size, _NO_TOKENS
                break
        return lease

    def _hold(self, lease: BlockLease, pages: list[int]) -> None:
        """Put `pages` into an empty lease; they keep their places in the free queue."""
        if pages:
            table = np.array(pages, np.int32)
            lease._set_pages(0, table)
            lease.num_tokens = lease.capacity = len(pages) * self.page_size
            lease.block = self._blocks[pages[-1]]
            refs = self.pool.refs
            self._queue.note_held(len(table) - int(np.count_nonzero(refs[table])))
            refs[table] += 1
            self._looking[table] += 1

    def _use(self, lease: BlockLease) -> None:
        """Take the pages of a lease out of the free queue."""
        if not lease.uses:
            lease.uses = True
            table = lease.page_table
            self._looking[table] -= 1
            users = self.pool.refs[table] - self._looking[table]
            self._queue.remove(table[users == 1].tolist())

    def _pin(self, lease: BlockLease) -> None:
        self._use(lease)

    def _cut_table(self, lease: BlockLease, start: int) -> None:
        """End the table at index `start`; pages no longer in use join the free queue."""
        pages = lease.page_table[start:][::-1].copy()
        lease._num_pages = start
        lease.capacity = start * self.page_size
        refs, looking = self.pool.refs, self._looking
        refs[pages] -= 1
        if not lease.uses:
            looking[pages] -= 1
            self._queue.note_held(-int(np.count_nonzero(refs[pages] == 0)))
            return
        idle = pages[refs[pages] == looking[pages]]
        self._queue.note_held(int(np.count_nonzero(refs[idle])))
        cached = [self._blocks[page] is not None for page in idle.tolist()]
        self._queue.prepend(p for p, c in zip(idle.tolist(), cached, strict=True) if not c)
        self._queue.append(p for p, c in zip(idle.tolist(), cached, strict=True) if c)
        self.clock += 1
        self._last_use[idle] = self.clock

    def _reserve(self, lease: BlockLease, num_tokens: int) -> None:
        have = lease._num_pages
        wanted = -(-num_tokens // self.page_size) - have
        self._make_room(wanted)  # pages that the lease has found are held: not free
        self._use(lease)
        lease._set_pages(have, self._allocate(wanted))
        lease.capacity = lease._num_pages * self.page_size

    def take_pages(self, count: int) -> Pages:
        self._make_room(count)
        return self._allocate(count)

    def _make_room(self, count: int) -> None:
        """Evict windows' saved states until `count` pages are free, and those that were last used
        before the blocks that would go.

        Raises:
            OutOfPages: there are too few pages; nothing has changed.
        """
        pool, windows = self.pool, self.windows
        room = pool.num_free
        if count > room and windows is not None:
            room += windows.counts["kept"]
        if count > room:
            raise OutOfPages(f"{count} pages wanted, {pool.num_free} free of {pool.num_pages}")
        while windows is not None and self.would_evict(count):
            cached = (p for p in self._queue if self._blocks[p] is not None and not pool.refs[p])
            age = None if count > pool.num_free else self._last_use.item(next(cached))
            if not windows.evict(age):
                break

    def _allocate(self, count: int) -> Pages:
        pages = self.pool.allocate(count)
        for page in pages.tolist():
            if self._blocks[page] is not None:
                self._evict_block(page)
        return pages

    def _publish(self, lease: BlockLease, tokens: Tokens, written: bool) -> None:
        if written and lease in self._in_flight:  # they follow tokens that are not written yet
            return
        if not written:
            self._in_flight.setdefault(lease, (lease.num_tokens, lease.tail))
            lease.publishing = True
        self._count(lease)
        start = lease.num_tokens - len(lease.tail)
        tokens = np.concatenate((lease.tail, tokens))
        full = len(tokens) // self.page_size * self.page_size
        lease.num_tokens = start + len(tokens)
        lease.tail = tokens[full:].copy()
        if full:
            self._publish_blocks(lease, start, tokens[:full])

    def _publish_blocks(self, lease: BlockLease, start: int, tokens: Tokens) -> None:
        """Cache whole blocks that begin at position `start`."""
        size, namespace = self.page_size, lease.namespace
        keys = as_block_namespace(namespace)
        block = lease.block
        parent = self._first_parent if block is None else block.hash
        ids, data = tokens.tolist(), tokens.tobytes()
        width = tokens.itemsize
        pages = lease._table[start // size : (start + len(ids)) // size].tolist()
        in_flight = lease in self._in_flight
        blocks: list[Block] = []
        for at, page in zip(range(0, len(ids), size), pages, strict=True):
            extra = None if keys is None else keys.keys(start + at, start + at + size)
            parent = hash_block((parent, tuple(ids[at : at + size]), extra))
            block = Block(parent, block, data[at * width : (at + size) * width], namespace)
            blocks.append(block)
            self._blocks[page] = block
            self._map.insert(parent, page)
            if in_flight:
                self._published[page] = None
        lease.block = block
        if self.events:
            self._emit(BlocksStored(blocks, start))

    @mutation
    def rollback(self) -> None:
        for page in reversed(self._published):
            self._forget(page)
        for lease, (num_tokens, tail) in reversed(self._in_flight.items()):
            for _ in range(lease.num_tokens // self.page_size - num_tokens // self.page_size):
                lease.block = lease.block and lease.block.parent
            lease.tail = tail
            lease.num_tokens = num_tokens
            lease.cached_tokens = min(lease.cached_tokens, num_tokens)
            self._cut_table(lease, -(-num_tokens // self.page_size))
        self._end_step()

    def _end_step(self) -> None:
        super()._end_step()
        self._published.clear()

    def _release(self, lease: BlockLease) -> None:
        self._cut_table(lease, 0)

    def _discard(self, lease: BlockLease) -> None:
        """Nothing of its hit: blocks do not know which others follow them."""
        first, end = (n // self.page_size for n in (lease.cached_tokens, lease.num_tokens))
        for page in lease._table[first:end].tolist():
            if self._blocks[page] is not None and not self.pool.refs[page]:
                self._evict_block(page)

    # -- eviction ------------------------------------------------------------------------------

    def would_evict(self, num_pages: int) -> bool:
        line = (page for page in self._queue if not self.pool.refs[page])
        left = self.pool.num_free - len(self._queue)  # pages of windows, which go before blocks
        later = max(0, num_pages - left)
        cached = any(self._blocks[page] is not None for page in islice(line, later))
        return cached or super().would_evict(num_pages)

    def _evict(self, num_pages: int) -> int:
        """Free pages forget their blocks. They count as free before and after, and keep their
        places in the queue; saved states of windows go first. O(pages in it)."""
        free = self.pool.num_free
        evicted = 0
        while self.windows is not None and evicted < num_pages and self.windows.evict():
            evicted = self.pool.num_free - free
        for page in self._queue:
            if evicted >= num_pages:
                break
            if self._blocks[page] is not None and not self.pool.refs[page]:
                self._evict_block(page)
                evicted += 1
        return evicted

    def _evict_block(self, page: int) -> None:
        self.changes += 1
        self.stats.evicted_pages += 1
        self.stats.evicted_tokens += self.page_size
        self._forget(page)

    def _forget(self, page: int) -> None:
        """Un-publish a page's block."""
        block = self._blocks[page]
        assert block is not None
        self._blocks[page] = None
        self._map.remove(block.hash, page)
        if self.events:
            self._emit(BlockEvicted(block, is_gone=self._map.get(block.hash) is None))

    # -- the whole -----------------------------------------------------------------------------

    def outline(self) -> Outline[Row]:
        """Blocks in a row are one node; one whose predecessor was evicted hangs at the root."""
        queue = self.queue
        queued = {page: len(queue) - at for at, page in enumerate(queue)}
        ages = {block_hash: queued.get(page, 0) for block_hash, page in self._map.items()}
        pins: dict[bytes, list[str]] = {}
        for (_, name), pin in self.pins.leases.items():
            assert isinstance(pin, BlockLease) and pin.block is not None
            pins.setdefault(pin.block.hash, []).append(name)
        leases: dict[bytes, list[int]] = {}
        for lease in self._leases.keys() - self.pins.leases.values():
            if lease.block is not None:
                leases.setdefault(lease.block.hash, []).append(lease.cached_tokens)
        rows = BlockRows(filter(None, self._blocks), ends=pins)

        def ends(row: Row) -> Ends:
            hits = [hit for block in row.blocks for hit in leases.get(block.hash, ())]
            return Ends(hits, pins.get(row.blocks[-1].hash, ()))

        return Outline(
            rows.tops,
            below=rows.below,
            sizes=lambda nodes: [len(row.blocks) * self.page_size for row in nodes],
            ages=lambda nodes: [min(ages[block.hash] for block in row.blocks) for row in nodes],
            ends=lambda nodes: {at: ends(row) for at, row in enumerate(nodes)},
            name=lambda row: row.blocks[0].hash[:8].hex(),
            start=lambda row: row.num_before * self.page_size,
            tokens=lambda row: np.frombuffer(b"".join(b.tokens for b in row.blocks), np.int32),
        )

    def _forget_cached(self) -> None:
        """The free queue keeps its order."""
        self._blocks = [None] * self.pool.num_pages
        self._map = BlockMap()

    def check(self) -> None:
        pool = self.pool
        refs, looking = np.zeros(pool.num_pages, np.int32), np.zeros(pool.num_pages, np.int32)
        refs[0] = 1
        for lease in self._leases:
            self._check_lease(lease)
            np.add.at(refs, lease.page_table, 1)
            if not lease.uses:
                np.add.at(looking, lease.page_table, 1)
        refs += self._count_windows()
        pool.check(refs)
        assert np.array_equal(looking, self._looking), "leases that only look are miscounted"
        self._queue.check()
        unused = np.flatnonzero(refs == looking)
        queue = np.union1d(self.queue, pool.free.to_array())
        assert np.array_equal(queue, unused), "the free queue != pages not in use"
        assert self._in_flight.keys() <= self._leases.keys()
        assert set(self.pins.leases.values()) <= self._leases.keys()

        cached = {page: block for page, block in enumerate(self._blocks) if block is not None}
        mapped = {page: block_hash for block_hash, page in self._map.items()}
        assert mapped == {page: block.hash for page, block in cached.items()}, "hashes != pages"
        assert self._published.keys() <= cached.keys()
        assert all(refs[page] for page in self._published), "a page in flight is free"

    def _check_lease(self, lease: BlockLease) -> None:
        size = self.page_size
        assert not lease.released
        assert lease.num_tokens <= lease.capacity == lease._num_pages * size
        assert len(lease.tail) == lease.num_tokens % size
        assert lease.uses or lease._num_pages * size == lease.num_tokens
        assert len(set(lease.page_table.tolist())) == lease._num_pages, f"{lease}: a page twice"
        full = lease.num_tokens // size
        block = lease.block
        for page in lease.page_table[:full][::-1].tolist():
            held = self._blocks[page]
            assert block is not None and held is not None, f"{lease}: page {page} was evicted"
            assert held.hash == block.hash, f"{lease}: page {page} holds another block"
            block = block.parent
        assert block is None
        for page in lease.page_table[full:].tolist():
            assert self._blocks[page] is None, f"{lease}: page {page} is both open and cached"
            assert self.pool.refs[page] == 1, f"{lease}: page {page} is open to two leases"
