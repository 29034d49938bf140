"""A store of KV pages in pinned host memory, below the pool of a GPU.

A slot is a row of bytes, the layers of a page together, so that a page is one copy each way. All
copies go to the stream on which the engine computes, and nobody waits for them. Order on the stream
is all that they need: a page is copied down after the steps that have written it and before the
step that writes over it, and a slot is read after it was written and before it is written again.
So a page counts as stored once its copy is enqueued, and as read once that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from radixcache.errors import InvalidRequest
from radixcache.kernels.upload import on_device
from radixcache.radix import RadixCache
from radixcache.runtime.kv_offload.loads import Loads
from radixcache.runtime.model.kv_pool import KVPool, count_pages
from radixcache.runtime.sizes import format_memory
from radixcache.tier import LowerTier, StoredPage

MOST_BYTES = 256 << 20
"""Loaded in one step: 5 ms at 55 GB/s (computed, PCIe 5), 2,048 tokens of Llama-3.1-8B."""

STAGED_BYTES = 2 * MOST_BYTES
"""Of the GPU, while as much is loaded: the rows, and one layout of them for the pool."""

_DOWN = 32 << 20
"""Bytes of the GPU that rows on their way down take at a time."""


class Counters(NamedTuple):
    """What a store has done; pages whose copies are enqueued."""

    stored_pages: int = 0
    loaded_pages: int = 0
    failed_pages: int = 0
    """Not copied, mostly for want of memory on the GPU."""


class HostStore:
    """`num_slots` pages of a pool on a GPU; a `PageStore` and a `Reader`, for the engine's thread.

    Args:
        pool: whose pages they are.

    Raises:
        InvalidRequest: the memory cannot be had, or not be pinned.
    """

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        self._pool, self.page_bytes = pool, pool.page_bytes
        self.counters = Counters()
        size = format_memory(num_slots * self.page_bytes)
        try:
            self._slots = torch.empty(num_slots, self.page_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError):
            raise InvalidRequest(f"host_memory: there are no {size} to be had") from None
        # torch's own pinned memory would be rounded up to a power of two.
        with on_device(pool.device):
            register = torch.cuda.cudart().cudaHostRegister
            code = int(register(self._slots.data_ptr(), self._slots.nbytes, 0))
        if code:
            raise InvalidRequest(f"host_memory: {size} cannot be pinned (CUDA error {code})")

    @torch.inference_mode()
    def save(self, pages: Sequence[int], stored: Sequence[StoredPage]) -> None:
        for page in stored:
            page.state = "lost"
        some, done = max(1, _DOWN // self.page_bytes), 0
        with suppress(torch.OutOfMemoryError):
            for start in range(0, len(pages), some):
                rows = self._pool.gather_pages(np.array(pages[start : start + some]))
                for row, page in zip(rows, stored[start:], strict=False):
                    self._slots[page.slot].copy_(row, non_blocking=True)
                    page.state = "stored"
                    done += 1
        self._count(stored_pages=done, failed_pages=len(pages) - done)

    @torch.inference_mode()
    def read(self, pages: Sequence[StoredPage]) -> Future[torch.Tensor]:
        """[n, page_bytes] uint8 on the GPU, on their way there: all of `pages`, or none if there is
        no memory for them."""
        done = Future[torch.Tensor]()
        try:
            rows = torch.empty(
                len(pages), self.page_bytes, dtype=torch.uint8, device=self._pool.device
            )
            for row, page in zip(rows, pages, strict=True):
                row.copy_(self._slots[page.slot], non_blocking=True)
            self._count(loaded_pages=len(pages))
            done.set_result(rows)
        except torch.OutOfMemoryError:
            self._count(failed_pages=len(pages))
            done.set_result(torch.empty(0, self.page_bytes, dtype=torch.uint8))
        return done

    def clear(self) -> None:
        """Slots are written before they are read again."""

    def close(self) -> None:
        """Give the memory back, once no copy needs it."""
        torch.cuda.synchronize(self._pool.device)
        torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())

    def _count(self, **more: int) -> None:
        now = self.counters._asdict()
        self.counters = Counters(**{name: n + more.get(name, 0) for name, n in now.items()})


class HostOffload:
    """Evicted pages of `cache` go to host memory, and come back from there.

    Args:
        memory: bytes of it, or an amount like 32GB.

    Raises:
        InvalidRequest: it holds no page, or is more than there is.
    """

    def __init__(self, memory: int | str, cache: RadixCache, pool: KVPool) -> None:
        num_slots = count_pages(memory, pool.page_bytes, torch.device("cpu"))
        self.store = HostStore(pool, num_slots)
        self.tier = cache.lower = LowerTier(num_slots, pool.page_size, self.store, "host")
        # All loads are taken: what a copy costs the host cannot tell, but a page of 16 tokens of an
        # 8B model (2 MB) takes 40 us at 55 GB/s, less than its tokens' products (computed).
        self.loads = Loads(
            cache, self.tier, self.store, pool,
            most_bytes=MOST_BYTES, most_loading=1, is_timed=False,
        )  # fmt: skip

    def describe(self) -> str:
        """How much room there is; in one line."""
        size = format_memory(self.tier.num_slots * self.store.page_bytes)
        tokens = self.tier.num_slots * self.tier.page_size
        return f"{size} = {tokens:,} tokens"

    def close(self) -> None:
        """Nothing is cached any more."""
        self.store.close()
