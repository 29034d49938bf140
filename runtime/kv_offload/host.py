"""A store of KV pages in pinned host memory, below the pool of a GPU.

A slot is a row of bytes, all layers of a page together, so that pages in consecutive slots are one
copy each way. All copies go to the stream on which the engine computes, and no code waits for them:
the order on the stream suffices. A page is copied down after the steps that have written it and
before the step that overwrites it, and a slot is read after it was written and before it is written
again. So a page counts as stored, or as read, once its copy is enqueued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter

import torch

from radixcache.errors import InvalidRequest
from radixcache.kernels.upload import on_device
from radixcache.pages import Pages
from radixcache.runtime.config.sizes import format_memory
from radixcache.runtime.kv_offload.store import Store
from radixcache.runtime.model.kv_pool import KVPool, count_pages, host_rows
from radixcache.tiers.stored_pages import StoredPage, StoredPages

MOST_BYTES = 256 << 20
"""Loaded in one step: 5 ms at 55 GB/s (computed, PCIe 5), 2,048 tokens of Llama-3.1-8B."""


_DOWN = 32 << 20
"""Bytes of GPU memory that pages on their way down take at a time."""


def staged_bytes(window_bytes: int = 0) -> int:
    """GPU memory that a load of `MOST_BYTES`, or of a window, takes: the rows, and the same in the
    pool's layout."""
    return 2 * max(MOST_BYTES, window_bytes)


class HostStore(Store):
    """Pages of a pool on a GPU. Its methods are for the engine's thread.

    Args:
        memory: bytes of host memory, or an amount like 32GB.
        pool: the pool of the pages.

    Raises:
        InvalidRequest: the memory holds no page, or cannot be allocated or pinned.
    """

    medium, most_bytes, most_loading, in_stream = "host", MOST_BYTES, 1, True
    place = "in host memory"

    def __init__(self, memory: int | str, pool: KVPool) -> None:
        super().__init__(pool, count_pages(memory, pool.page_bytes, torch.device("cpu")))
        size = format_memory(self.num_slots * self.page_bytes)
        self._copied: dict[int, torch.cuda.Event] = {}
        """An event after the last copy into each slot."""
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None
        """Events before and after the last read, and its bytes."""
        try:
            self._slots = torch.empty(self.num_slots, self.page_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError):
            raise InvalidRequest(f"host_memory: {size} cannot be allocated") from None
        # torch's own pinned memory would be rounded up to a power of two.
        with on_device(pool.device):
            register = torch.cuda.cudart().cudaHostRegister
            code = int(register(self._slots.data_ptr(), self._slots.nbytes, 0))
        if code:
            raise InvalidRequest(f"host_memory: {size} cannot be pinned (CUDA error {code})")

    @torch.inference_mode()
    def save(self, pages: Pages, stored: StoredPages) -> None:
        stored.finish("lost")
        began = perf_counter()
        some, done = max(1, _DOWN // self.page_bytes), 0
        copied = torch.cuda.Event()
        with suppress(torch.OutOfMemoryError):
            for start in range(0, len(pages), some):
                rows = self._pool.gather_pages(pages[start : start + some])
                for part, slots in _runs(stored.pages()[start : start + some]):
                    self._slots[slots].copy_(rows[part], non_blocking=True)
                    done = start + part.stop
                    for page in stored.pages()[start + part.start : done]:
                        page.state = "stored"
        self._copied.update(dict.fromkeys((page.slot for page in stored.pages()[:done]), copied))
        copied.record()
        self._count(stored_pages=done, failed_pages=len(pages) - done)
        self.saving += perf_counter() - began

    @torch.inference_mode()
    def read(self, pages: Sequence[StoredPage]) -> Future[torch.Tensor]:
        """[n, page_bytes] uint8 on the GPU, in the order of its stream: all of `pages`, or none if
        the GPU has no memory for them."""
        done = Future[torch.Tensor]()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            rows = torch.empty(
                len(pages), self.page_bytes, dtype=torch.uint8, device=self._pool.device
            )
            begin.record()
            for part, slots in _runs(pages):
                rows[part].copy_(self._slots[slots], non_blocking=True)
            end.record()
            self._timed = begin, end, rows.nbytes
            self._count(loaded_pages=len(pages))
            done.set_result(rows)
        except torch.OutOfMemoryError:
            self._count(failed_pages=len(pages))
            done.set_result(torch.empty(0, self.page_bytes, dtype=torch.uint8))
        return done

    def read_pages(self, pages: Pages) -> torch.Tensor:
        """A copy of the slots `pages` for the store below: [n, page_bytes] uint8 on the host."""
        for copied in {self._copied[slot] for slot in pages.tolist()}:
            copied.synchronize()
        rows = host_rows(len(pages), self.page_bytes)
        return torch.index_select(self._slots, 0, torch.from_numpy(pages).long(), out=rows)

    def read_seconds(self, size: int) -> float | None:
        if self._timed is not None and self._timed[1].query():
            begin, end, num_bytes = self._timed
            self.reading.note(num_bytes, begin.elapsed_time(end) / 1000)
            self._timed = None
        return super().read_seconds(size)

    def clear(self) -> None:
        """Nothing to do: slots are written before they are read again."""

    def close(self, in_order: Iterable[StoredPage]) -> None:
        """Unpin the memory, once no copy needs it."""
        torch.cuda.synchronize(self._pool.device)
        torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())


def _runs(pages: Sequence[StoredPage]) -> Iterator[tuple[slice, slice]]:
    """The parts of `pages` in consecutive slots, and these slots: one copy each, since a launch
    takes 12 us (H100). Pages that leave the pool together mostly are in consecutive slots."""
    start = 0
    for end, page in enumerate(pages, 1):
        if end == len(pages) or pages[end].slot != page.slot + 1:
            yield slice(start, end), slice(pages[start].slot, page.slot + 1)
            start = end
