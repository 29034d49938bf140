"""The tiers below the pool of one engine: opened when it is built, closed when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from radixcache.errors import InvalidRequest
from radixcache.radix.cache import RadixCache
from radixcache.runtime.config.sizes import format_memory, parse_memory
from radixcache.runtime.kv_offload import session
from radixcache.runtime.kv_offload.host import HostStore
from radixcache.runtime.kv_offload.loads import Loads
from radixcache.runtime.kv_offload.notes import PrefixNote
from radixcache.runtime.kv_offload.store import Store
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.states.stored_windows import StoredWindows
from radixcache.tiers.index import LowerTier

if TYPE_CHECKING:  # imports xxhash and sqlite3
    from radixcache.runtime.kv_offload.disk import DiskStore


class Offload:
    """Moves evicted pages of a cache to stores, and back.

    Args:
        host: keeps pages of `pool`.
        disk: keeps pages of `pool`, below `host` if there are both.

    Attributes:
        disk: can also keep notes for the next process; None without `kv_dir`.
    """

    def __init__(
        self,
        cache: RadixCache,
        pool: KVPool,
        host: HostStore | None = None,
        disk: DiskStore | None = None,
    ) -> None:
        self._cache, self._pool, self.disk = cache, pool, disk
        self._process = os.getpid()
        self.tiers: list[LowerTier[Store]] = []
        stores: list[Store] = [store for store in (disk, host) if store is not None]
        for store in stores:
            below = self.tiers[0] if self.tiers else None
            tier = LowerTier(store.num_slots, pool.page_size, store, store.medium, below)
            tier.restore(store.stored())
            self.tiers.insert(0, tier)
        cache.lower = self.tiers[0]
        self._store_windows()
        if host is not None and disk is not None:
            disk.source = host
        self.loads = Loads(cache, pool)

    def _store_windows(self) -> None:
        """Let windows that the pool evicts go to the cache's tiers."""
        if (windows := self._cache.windows) is not None and self._cache.lower is not None:
            windows.stored = StoredWindows(self._cache.lower, windows.span)

    def describe(self) -> list[str]:
        """A line for each tier: place, size, tokens in it, and pages that found no room."""
        lines = []
        for tier in self.tiers:
            store, room, gone = tier.store, tier.num_slots * tier.page_size, ""
            if tier.num_evicted and tier.below is None:
                gone = f" ({tier.num_evicted:,} pages had no room)"
            size = format_memory(tier.num_slots * store.page_bytes)
            lines += [f"KV {store.place} ({size}): {tier.num_tokens:,} of {room:,} tokens{gone}"]
        return lines

    def close(
        self, turns: Conversations | None = None, prefixes: Iterable[PrefixNote] = ()
    ) -> None:
        """Close the stores, after the last change of the cache. If there is a disk, all that is
        cached is written to it for the next process. Does nothing in a fork of the process.

        Args:
            turns: how the engine's conversations were tokenised.
            prefixes: the prefixes that are pinned without a salt.
        """
        if os.getpid() != self._process:
            return
        try:
            if self.disk is not None:
                self.disk.is_closing = True
                session.save(self.disk, turns, prefixes)
                self._cache.recover()
                for tier in self.tiers[:-1]:  # the last used pages are written last
                    tier.recover([])  # no request waits for a load
                    tier.evict_all()
                self.disk.source, self._cache.lower = self._pool, self.tiers[-1]
                self._store_windows()
                for namespace, name in [*self._cache.pins]:
                    self._cache.unpin(name, namespace)
                self._cache.evict(self._cache.pool.num_pages)
        finally:
            for tier in reversed(self.tiers):  # closing host memory fails if the device was lost
                tier.store.close(tier.in_order())


def open_offload(
    name_or_path: str,
    model: PagedModel,
    cache: object,
    pool: KVPool,
    host_memory: int | str | None,
    kv_dir: str | Path | None,
    kv_dir_size: int | str | None,
) -> Offload | None:
    """The tiers that the engine's arguments `host_memory` and `kv_dir` ask for; None for none.

    Raises:
        InvalidRequest: the model has recurrent states, the memory cannot be had or holds no page,
            or the folder cannot be used.
    """
    if host_memory is None and kv_dir is None:
        return None
    if model.state_shapes:
        asked = "kv_dir" if host_memory is None else "host_memory"
        raise InvalidRequest(
            f"{asked} is not for model type {model.model_type!r}: its recurrent states are not kept"
        )
    assert isinstance(cache, RadixCache)
    host = disk = None
    if host_memory is not None:
        report("pinning host memory", 1.0)
        host = HostStore(host_memory, pool)
    try:
        if kv_dir is not None:
            from radixcache.runtime.kv_offload.disk import open_disk

            report("reading the KV directory", 1.0)
            assert kv_dir_size is not None
            folder, size = Path(kv_dir).expanduser(), parse_memory(kv_dir_size)
            disk = open_disk(folder, size, model, name_or_path, pool)
        return Offload(cache, pool, host, disk)
    except BaseException:
        if host is not None:
            host.close([])
        raise
