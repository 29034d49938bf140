"""The tiers below the pool of one engine: opened when it is built, closed when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from radixcache.errors import InvalidRequest
from radixcache.radix import RadixCache
from radixcache.runtime.config.sizes import format_memory, parse_memory
from radixcache.runtime.kv_offload import session
from radixcache.runtime.kv_offload.host import HostStore
from radixcache.runtime.kv_offload.loads import Level, Loads
from radixcache.runtime.kv_offload.store import Store
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.tier import LowerTier

if TYPE_CHECKING:  # imports xxhash and sqlite3
    from radixcache.runtime.engine.args import EngineArgs
    from radixcache.runtime.kv_offload.disk import DiskStore


class Offload:
    """Evicted pages of `cache` go to a store, and come back from there.

    Args:
        host: of pages of `pool`.
        disk: the same; below `host` if there are both.

    Attributes:
        disk: where texts can be kept for the next process; None if nowhere.
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
        self.levels: list[Level] = []
        stores: list[Store] = [store for store in (disk, host) if store is not None]
        for store in stores:
            below = self.levels[0].tier if self.levels else None
            tier = LowerTier(store.num_slots, pool.page_size, store, store.medium, below)
            tier.restore(store.stored())
            self.levels.insert(0, Level(tier, store))
        cache.lower = self.levels[0].tier
        if host is not None and disk is not None:
            disk.source = host
        self.loads = Loads(cache, self.levels, pool)

    def describe(self) -> list[str]:
        """Where, how much room, what is there, and what found no room below; a line for each."""
        lines = []
        for tier, store in ((level.tier, level.store) for level in self.levels):
            gone = ""
            if tier.num_evicted and tier.below is None:
                gone = f" ({tier.num_evicted:,} pages had no room)"
            size = format_memory(tier.num_slots * store.page_bytes)
            room = tier.num_slots * tier.page_size
            lines += [f"KV {store.place} ({size}): {tier.num_tokens:,} of {room:,} tokens{gone}"]
        return lines

    def close(
        self, turns: Conversations | None = None, prefixes: Iterable[session.Prefix] = ()
    ) -> None:
        """End it; nothing changes the cache any more. To a disk, all that is cached is written for
        the next process. A fork of this process, which has none of its threads, leaves it alone.

        Args:
            turns: how its conversations were tokenised.
            prefixes: what is pinned without a salt.
        """
        if os.getpid() != self._process:
            return
        try:
            if self.disk is not None:
                self.disk.is_closing = True
                session.save(self.disk, turns, prefixes)
                self._cache.recover()
                for level in self.levels[:-1]:  # what was used last is written last
                    level.tier.recover([])  # nobody waits for a load any more
                    level.tier.evict_all()
                self.disk.source, self._cache.lower = self._pool, self.levels[-1].tier
                for namespace, name in self._cache.pins:
                    self._cache.unpin(name, namespace)
                self._cache.evict(self._cache.pool.num_pages)
        finally:
            for level in reversed(self.levels):  # a device that was lost closes no host memory
                level.store.close(level.tier.in_order())


def open_offload(
    args: EngineArgs, name_or_path: str, model: PagedModel, cache: object, pool: KVPool
) -> Offload | None:
    """What `host_memory` or `kv_dir` asks for.

    Raises:
        InvalidRequest: the model has recurrent states, the memory cannot be had or holds no page,
            or the folder cannot be used.
    """
    settings = {"host_memory": args.host_memory, "kv_dir": args.kv_dir}
    asked = [name for name, value in settings.items() if value is not None]
    if not asked:
        return None
    if model.bytes_per_state:
        raise InvalidRequest(
            f"{asked[0]} is not for model type {model.model_type!r}: its recurrent states are not "
            "kept"
        )
    assert isinstance(cache, RadixCache)
    host = disk = None
    if args.host_memory is not None:
        report("pinning host memory", 1.0)
        host = HostStore(args.host_memory, pool)
    try:
        if args.kv_dir is not None:
            from radixcache.runtime.kv_offload.disk import open_disk

            report("reading the KV directory", 1.0)
            assert args.kv_dir_size is not None
            folder, size = Path(args.kv_dir).expanduser(), parse_memory(args.kv_dir_size)
            disk = open_disk(folder, size, model, name_or_path, pool)
        return Offload(cache, pool, host, disk)
    except BaseException:
        if host is not None:
            host.close([])
        raise
