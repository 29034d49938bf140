"""A store of KV pages on disk, read and written by threads; `files.py` describes its files."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter, time_ns
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
import xxhash

from radixcache.errors import Busy, InvalidRequest, first_sentence
from radixcache.pages import Pages
from radixcache.runtime.config.sizes import format_memory
from radixcache.runtime.kv_offload import files
from radixcache.runtime.kv_offload.files import (
    INDEX,
    PAGES,
    ROWS,
    checksum_of,
    lock_folder,
    make_room,
    open_index,
    read_all,
    remove_others,
    unlock,
    write_all,
)
from radixcache.runtime.kv_offload.fingerprint import fingerprint
from radixcache.runtime.kv_offload.notes import ABOUT, RESPONSE, AboutNote
from radixcache.runtime.kv_offload.store import PageSource, Store
from radixcache.runtime.model.host.system_memory import total_memory
from radixcache.runtime.model.kv_pool import KVPool, host_rows
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.tiers.stored_pages import StoredPage, StoredPages

MAX_QUEUED_BYTES = 256 << 20
"""Most bytes of pages that wait to be written (more are dropped), or that are read at a time."""

_SHARE = 16
"""Both are at most the machine's memory divided by this."""

_WRITTEN_BYTES = 16 << 20
"""Bytes that are copied and queued at a time."""

_SYNCED_WRITES = 4
"""Writes that are synced and entered into the manifest together."""

_GONE_SECONDS = 20.0

_READERS = 2
T = TypeVar("T")

_log = logging.getLogger("radixcache")


class _Write(NamedTuple):
    """Pages of a run, from index `first` on, to be written, and their bytes.

    Attributes:
        last_use: time of the run's first page; each further page counts as used just before its
            parent. Times of later processes are later.
    """

    rows: torch.Tensor
    run: StoredPages
    first: int
    last_use: int

    def pages(self) -> list[StoredPage]:
        return self.run.pages()[self.first : self.first + len(self.rows)]


class _Job(NamedTuple):
    """A function that the writer is to run in a transaction."""

    function: Callable[[], Any]
    future: Future[Any]


def confirm_gone(future: Future[Any]) -> None:
    """Wait until deleted data has gone from the disk.

    Raises:
        Busy: the deletion has failed, or takes too long.
    """
    try:
        future.result(_GONE_SECONDS)
    except Exception as error:
        why = "it takes long" if isinstance(error, futures.TimeoutError) else first_sentence(error)
        raise Busy(f"the disk still holds it: {why}") from None


class DiskStore(Store):
    """The pages of one model on disk.

    Reads and writes run in threads. Their errors are counted, and the first one is logged; the page
    is then not kept, or not found.

    Args:
        folder: the model's folder in `kv_dir`, which is locked.
        pool: the pool of the pages.
        num_slots: pages that the file holds.
        about: describes the model.
        lock: the lock of `kv_dir`, to be released at the end.

    Attributes:
        source: the pool, or the store above, whose pages `save` is given.
        cleared: done once the last `clear` has reached the disk.
        is_closing: the engine has ended, so that `save` may wait for the disk.

    Raises:
        InvalidRequest: the disk has no room, or the folder cannot be written.
    """

    medium, most_bytes, most_loading, in_stream = "disk", MAX_QUEUED_BYTES // 4, 4, False

    def __init__(
        self, folder: Path, pool: KVPool, num_slots: int, about: str = "", lock: int | None = None
    ) -> None:
        super().__init__(pool, num_slots)
        self.place, self._folder, self._held = f"on disk, {folder.parent}", folder, lock
        self.source: PageSource = pool
        self.is_closing = False
        self._most_queued = min(MAX_QUEUED_BYTES, total_memory() // _SHARE)
        self.most_bytes = self._most_queued // self.most_loading
        self.cleared: Future[None] | None = None
        self._checksums: dict[int, bytes] = {}
        self._queued = 0
        self._warned = self._was_read = False
        self._file = -1
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(folder / PAGES, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            make_room(self._file, num_slots * self.page_bytes)
            self._index = open_index(folder / INDEX)
        except BaseException as error:
            if self._file >= 0:
                os.close(self._file)
            if not isinstance(error, OSError):
                raise
            raise InvalidRequest(
                f"kv_dir {folder.parent} cannot hold {format_memory(num_slots * self.page_bytes)}: "
                f"{error.strerror} (say a smaller kv_dir_size)"
            ) from None
        self._writes: SimpleQueue[_Write | _Job | None] = SimpleQueue()
        self._writer = Thread(target=self._work, name="radixcache-kv-writer", daemon=True)
        self._writer.start()
        self.note(ABOUT, json.dumps(AboutNote(about, self.page_bytes)._asdict()))
        self._readers = ThreadPoolExecutor(_READERS, "radixcache-kv-reader")

    # -- what the engine's thread calls -----------------------------------------------------------

    def stored(self) -> list[StoredPage]:
        """The pages in the manifest, least recently used first; invalid rows are deleted. To be
        called once, before anything else."""
        try:
            return self._on_thread(self._stored)
        except sqlite3.Error as error:
            self.close([])
            reason = first_sentence(error)
            raise InvalidRequest(f"kv_dir {self._folder.parent} cannot be used: {reason}") from None

    def _stored(self) -> list[StoredPage]:
        found: dict[bytes, StoredPage] = {}
        rows = self._index.execute(f"{ROWS} order by last_use").fetchall()
        for slot, parent, key, tokens, checksum in rows:
            blobs, size = (parent, key, checksum, tokens), 4 * self._pool.page_size
            lengths = [len(blob) if isinstance(blob, bytes) else 0 for blob in blobs]
            known = lengths[:3] == [16, 16, 16] and lengths[3] in range(4, size + 1, 4)
            if known and slot in range(self.num_slots) and key not in found:
                found[key] = StoredPage(
                    slot, parent, key, np.frombuffer(tokens, np.int32), "stored"
                )
                self._checksums[slot] = checksum
        gone = sum(slot not in range(self.num_slots) for slot, *_ in rows)
        if gone:
            _log.warning("kv_dir_size is less than it was: %s pages are removed", f"{gone:,}")
        self._delete_stale_rows()
        self._was_read = True
        return [*found.values()]

    def _delete_stale_rows(self) -> None:
        """Delete rows that are invalid, or that a reset could not delete."""
        rows = self._index.execute("select slot from pages").fetchall()
        left = [(slot,) for (slot,) in rows if slot not in self._checksums]
        self._index.executemany("delete from pages where slot = ?", left)

    def save(self, pages: Pages, stored: StoredPages) -> None:
        some, now, began = max(1, _WRITTEN_BYTES // self.page_bytes), time_ns(), perf_counter()
        for at in range(0, len(pages), some):
            self._save(pages[at : at + some], stored, at, now)
        self.saving += perf_counter() - began

    def _save(self, pages: Pages, run: StoredPages, first: int, now: int) -> None:
        size = len(pages) * self.page_bytes
        if self.is_closing and self._queued + size > self._most_queued:
            self.flush()
        with self._lock:
            full = self._queued + size > self._most_queued and self._queued > 0
            self._queued += 0 if full else size
        try:
            if not full:
                self._writes.put(_Write(self.source.read_pages(pages), run, first, now))
                return
            self._count(dropped_pages=len(pages))
        except Exception as error:  # such as lack of memory
            with self._lock:
                self._queued -= size
            self._failed(len(pages), error)
        for page in run.pages()[first : first + len(pages)]:
            page.state = "lost"

    def read(self, pages: Sequence[StoredPage]) -> Future[torch.Tensor]:
        """As in `Store`; the first page after those returned is "lost" then."""
        return self._readers.submit(self._read, [*pages])

    def clear(self) -> None:
        self.cleared = self._submit(self._forget)

    def flush(self) -> None:
        """Wait until all saved pages are written or lost."""
        self._on_thread(lambda: None)

    def note(self, name: str, value: str) -> Future[object]:
        """Keep a text under a name for the next process; done once it is written."""
        replace, row = "insert or replace into notes values (?, ?, ?)", (name, value)
        checksum = xxhash.xxh3_128(value.encode()).digest()
        return self._submit(lambda: self._index.execute(replace, (*row, checksum)))

    def drop_note(self, name: str) -> Future[object]:
        """Delete the note of that name; done once the files have no trace of it."""
        delete = "delete from notes where name = ?"
        return self._submit(lambda: self._index.execute(delete, (name,)))

    def notes(self) -> dict[str, str]:
        """The notes whose checksums are right, oldest first."""
        query = "select name, value, checksum from notes order by rowid"
        try:
            rows = self._on_thread(lambda: self._index.execute(query).fetchall())
        except sqlite3.Error:  # `_run` has counted it
            return {}
        texts = [row for row in rows if isinstance(row[1], str)]
        return {n: text for n, text, c in texts if xxhash.xxh3_128(text.encode()).digest() == c}

    def close(self, in_order: Iterable[StoredPage]) -> None:
        """Write what is queued, and the eviction order of the pages; end the threads."""
        slots = [(at, page.slot) for at, page in enumerate(in_order)]
        update = "update pages set last_use = ? where slot = ?"
        self._submit(lambda: self._index.executemany(update, slots))
        if self._was_read:
            self._submit(self._delete_stale_rows)
        self._writes.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._index.close()
        os.close(self._file)
        if self._held is not None:
            unlock(self._held)

    def _on_thread(self, function: Callable[[], T]) -> T:
        """The result of `function`, run by the writer, the only thread that uses the manifest;
        `sqlite3.Error` if the store is closed, or this process is a fork."""
        return self._submit(function).result()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        """Let the writer run `function`; done with its result once that is committed."""
        future: Future[T] = Future()
        if self._writer.is_alive():
            self._writes.put(_Job(function, future))
        else:
            future.set_exception(sqlite3.ProgrammingError("the store is closed"))
        return future

    # -- threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Work through the queue, in order; writes that wait together are synced together."""
        ends = False
        while not ends:
            jobs = [self._writes.get()]
            while not self._writes.empty():
                jobs.append(self._writes.get())
            for are_writes, some in groupby(jobs, lambda job: isinstance(job, _Write)):
                if are_writes:
                    writes = [*cast(Iterable[_Write], some)]
                    for at in range(0, len(writes), _SYNCED_WRITES):
                        self._write(writes[at : at + _SYNCED_WRITES])
                else:
                    for job in cast(Iterable[_Job | None], some):
                        ends |= job is None
                        self._run(job)

    def _run(self, job: _Job | None) -> None:
        if job is None:
            return
        try:
            with self._index:
                result = job.function()
            job.future.set_result(result)
        except Exception as error:  # the thread must go on: others wait for it
            self._failed(0, error)
            job.future.set_exception(error)

    def _write(self, writes: Sequence[_Write]) -> None:
        pages: list[StoredPage] = []
        state: Literal["stored", "lost"] = "lost"
        try:
            pages += [page for write in writes for page in write.pages()]
            for page in pages:
                self._checksums.pop(page.slot, None)
            with self._index:
                slots = [(page.slot,) for page in pages]
                self._index.executemany("delete from pages where slot = ?", slots)
            rows = [row for write in writes for row in write.rows.numpy()]
            for page, row in zip(pages, rows, strict=True):
                write_all(self._file, row, page.slot * self.page_bytes)
            files.sync(self._file)
            uses = [w.last_use - w.first - at for w in writes for at in range(len(w.rows))]
            found = [checksum_of(_about(page), row) for page, row in zip(pages, rows, strict=True)]
            with self._index:
                self._index.executemany(
                    "insert or replace into pages values (?, ?, ?, ?, ?, ?)",
                    [
                        (page.slot, page.parent, page.key, page.tokens.tobytes(), checksum, use)
                        for use, page, checksum in zip(uses, pages, found, strict=True)
                    ],
                )
            self._checksums.update((p.slot, c) for p, c in zip(pages, found, strict=True))
            self._count(stored_pages=len(pages))
            state = "stored"
        except Exception as error:
            self._failed(sum(len(write.rows) for write in writes), error)
        finally:
            for page in pages:
                page.state = state
            with self._lock:
                self._queued -= sum(write.rows.nbytes for write in writes)

    def _read(self, pages: list[StoredPage]) -> torch.Tensor:
        began, num_good = perf_counter(), len(pages)
        try:
            rows = host_rows(len(pages), self.page_bytes)
        except MemoryError as lack:
            self._failed(len(pages), lack)
            return torch.empty(0, self.page_bytes, dtype=torch.uint8)
        data, checksums = rows.numpy(), self._checksums
        for at, page in enumerate(pages):  # also after a spoilt one: to find all that are
            error: Exception = OSError(f"slot {page.slot} does not hold what was written")
            try:
                good = read_all(self._file, data[at], page.slot * self.page_bytes)
                good = good and checksum_of(_about(page), data[at]) == checksums.get(page.slot)
            except Exception as raised:
                good, error = False, raised
            if not good:
                page.state, num_good = "lost", min(num_good, at)
                self._failed(1, error)
        self._count(loaded_pages=num_good)
        with self._lock:
            self.reading.note(rows.nbytes, perf_counter() - began)
        return rows[:num_good]

    def _forget(self) -> None:
        """Delete all pages and notes from the files, except stored responses, which stay until they
        are deleted. KV goes first: even if the manifest is locked, no row finds it again."""
        self._checksums.clear()
        os.ftruncate(self._file, 0)
        self._index.execute("delete from pages")
        kept = "name != ? and name not like ?"
        self._index.execute(f"delete from notes where {kept}", (ABOUT, f"{RESPONSE}%"))
        self._index.commit()
        make_room(self._file, self.num_slots * self.page_bytes)

    def _failed(self, count: int, error: Exception) -> None:
        self._count(failed_pages=count)
        if not self._warned:
            self._warned = True
            what = first_sentence(error)
            _log.warning("KV pages in %s are lost, and computed again: %s", self._folder, what)


def _about(page: StoredPage) -> bytes:
    return page.parent + page.key + page.tokens.tobytes()


def open_disk(
    kv_dir: Path, size: int, model: PagedModel, name_or_path: str, pool: KVPool
) -> DiskStore:
    """Open the store of a model in `kv_dir`, with the pages of earlier processes.

    Args:
        kv_dir: a folder for the pages of one model at a time, and for one process.
        size: bytes that it may take.
        name_or_path: the model.

    Raises:
        InvalidRequest: the folder is in use or cannot be written, or `size` is too small or too
            large.
    """
    num_slots = size // pool.page_bytes
    if num_slots < 1:
        raise InvalidRequest(
            f"kv_dir_size of {size:,} bytes holds no page; one takes {pool.page_bytes:,}"
        )
    if num_slots * pool.page_size < model.max_context:
        _log.warning(
            "kv_dir_size holds %s tokens, fewer than one context (%s)",
            f"{num_slots * pool.page_size:,}", f"{model.max_context:,}",
        )  # fmt: skip
    lock = lock_folder(kv_dir)
    try:
        folder = kv_dir / fingerprint(model, name_or_path, pool)
        dtype = str(model.dtype).removeprefix("torch.")
        dtype += f", KV in {model.kv_cache_dtype}" * (model.kv_cache_dtype != "auto")
        dtype += ", activations in 8 bits" * model.quantized_activations
        exact = ", exact" * model.exact
        about = f"{Path(name_or_path).name} in {dtype}{exact}, pages of {pool.page_size} tokens"
        about += ", windows kept apart" * (pool.windows is not None)
        remove_others(kv_dir, folder, about)
        return DiskStore(folder, pool, num_slots, about, lock)
    except BaseException:
        unlock(lock)
        raise
