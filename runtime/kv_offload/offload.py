"""The tier on disk of one engine: opened when it is built, closed when it ends."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from radixcache.errors import InvalidRequest, first_sentence
from radixcache.radix import RadixCache
from radixcache.runtime.kv_offload import session
from radixcache.runtime.kv_offload.disk import DiskStore
from radixcache.runtime.kv_offload.files import lock_folder, remove_others
from radixcache.runtime.kv_offload.fingerprint import fingerprint
from radixcache.runtime.kv_offload.loads import Loads
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.sizes import format_memory
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.tier import LowerTier

_log = logging.getLogger("radixcache")


class DiskOffload:
    """Evicted pages of `cache` go to disk, and come back from there; also those of a process that
    ran the same model before.

    Args:
        kv_dir: a folder for the pages of one model at a time, and for one process.
        size: bytes of it.
        name_or_path: of the model.

    Raises:
        InvalidRequest: the folder is in use or cannot be written, or `size` is too small or too
            large.
    """

    def __init__(
        self,
        kv_dir: Path,
        size: int,
        model: PagedModel,
        name_or_path: str,
        cache: RadixCache,
        pool: KVPool,
    ) -> None:
        self._cache = cache
        num_slots = size // pool.page_bytes
        if 0 < num_slots * pool.page_size < model.max_context:
            _log.warning(
                "kv_dir_size holds %s tokens, fewer than one context (%s)",
                f"{num_slots * pool.page_size:,}", f"{model.max_context:,}",
            )  # fmt: skip
        if num_slots < 1:
            raise InvalidRequest(
                f"kv_dir_size of {size:,} bytes holds no page; one takes {pool.page_bytes:,}"
            )
        self._lock, store = lock_folder(kv_dir), None
        try:
            folder = kv_dir / fingerprint(model, name_or_path, pool.page_size)
            dtype = str(model.dtype).removeprefix("torch.")
            exact = ", exact" * model.exact
            about = f"{Path(name_or_path).name} in {dtype}{exact}, pages of {pool.page_size} tokens"
            remove_others(kv_dir, folder, about)
            self.store = store = DiskStore(folder, pool, num_slots, about)
            self.tier = LowerTier(num_slots, pool.page_size, self.store)
            self.tier.restore(self.store.stored())
        except BaseException as error:
            if store is not None:
                store.close([])
            os.close(self._lock)
            if isinstance(error, sqlite3.Error):
                reason = first_sentence(error)
                raise InvalidRequest(f"kv_dir {kv_dir} cannot be used: {reason}") from None
            raise
        cache.lower = self.tier
        self.loads = Loads(cache, self.tier, self.store, pool)
        self._kv_dir = kv_dir
        _log.info("KV on disk: %s", self.describe())

    def describe(self) -> str:
        """Where, how much room, what is there, and what had no room; in one line."""
        size, gone = format_memory(self.tier.num_slots * self.store.page_bytes), ""
        if self.tier.num_evicted:
            gone = f" ({self.tier.num_evicted:,} pages had no room)"
        return f"{self._kv_dir} ({size}): {self.tier.num_tokens:,} tokens{gone}"

    def close(self, turns: Conversations | None, prefixes: Iterable[session.Prefix]) -> None:
        """Write all that is cached, for the next process; nothing changes the cache any more.

        Args:
            turns: how its conversations were tokenised.
            prefixes: what is pinned without a salt.
        """
        self.store.is_closing = True
        session.save(self.store, turns, prefixes)
        self._cache.recover()
        for namespace, name in self._cache.pins:
            self._cache.unpin(name, namespace)
        self._cache.evict(self._cache.pool.num_pages)
        self.store.close(self.tier.in_order())
        os.close(self._lock)
