"""Pages on disk: one file of slots, and a manifest of what is in them.

    DIR/lock                        held by the process that uses the folder
    DIR/<fingerprint>/pages.kv      slot i is the bytes [i * page_bytes, (i + 1) * page_bytes)
    DIR/<fingerprint>/index.sqlite  a row for each slot in use

What makes KV differ has another fingerprint, and so another folder. Each page has a checksum of its
bytes and of its key, which stands for all tokens up to its end; it is compared at each load. So
whatever happened to the files (a crash, a full disk, a changed bit, swapped slots), the worst is
that a page is computed again; what is synced to the disk only decides how much survives. A row is
deleted before its slot is written again, and written once the bytes are.

Files hold what was asked and answered: folders are 0700, files 0600.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
import xxhash

from radixcache.errors import InvalidRequest, first_sentence
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.sizes import format_memory
from radixcache.tier import StoredPage

PAGES, INDEX, LOCK = "pages.kv", "index.sqlite", "lock"

MAX_QUEUED_BYTES = 256 << 20
"""Of pages that wait to be written; what comes then is not kept."""

_READERS = 2
_SCHEMA = """
create table if not exists pages (slot integer primary key, parent blob not null, key blob not null,
    tokens blob not null, checksum blob not null, last_use integer not null);
create table if not exists notes (name text primary key, value text not null, checksum blob);
"""

_log = logging.getLogger("radixcache")


class _Write(NamedTuple):
    """Pages to be written, and their bytes."""

    rows: torch.Tensor
    stored: Sequence[StoredPage]


class Counters(NamedTuple):
    """What a store has done."""

    stored_pages: int = 0
    loaded_pages: int = 0
    dropped_pages: int = 0
    """Not kept, because the disk was too slow."""
    failed_pages: int = 0
    """Not written, or not as they were when they were read."""


def lock_folder(folder: Path) -> int:
    """Make `folder`, and lock it; the lock lives as long as the file that is returned.

    Raises:
        InvalidRequest: it cannot be used, or another process uses it.
    """
    try:
        import fcntl
    except ImportError:
        raise InvalidRequest("kv_dir needs file locks, which this system does not have") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidRequest(f"kv_dir {folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InvalidRequest(f"kv_dir {folder} is in use by another process") from None
    return lock


class DiskStore:
    """The pages of one model on disk; a `PageStore`.

    Reads and writes run in threads. Whatever they meet is counted, and logged the first time; the
    page is then not kept, or not found.

    Args:
        folder: of the model in `kv_dir`, which is locked.
        pool: whose pages they are.
        num_slots: pages that the file holds.

    Raises:
        InvalidRequest: there is no room on the disk, or no right to write.
    """

    def __init__(self, folder: Path, pool: KVPool, num_slots: int) -> None:
        self._pool, self._folder = pool, folder
        self.num_slots, self.page_bytes = num_slots, pool.page_bytes
        self.counters = Counters()
        self._checksums: dict[int, bytes] = {}
        self._lock = Lock()
        self._queued = 0
        self._warned = False
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(folder / PAGES, os.O_RDWR | os.O_CREAT, 0o600)
            _make_room(self._file, num_slots * self.page_bytes)
        except OSError as error:
            raise InvalidRequest(
                f"kv_dir {folder.parent} cannot hold {format_memory(num_slots * self.page_bytes)}: "
                f"{error.strerror} (say a smaller kv_dir_size)"
            ) from None
        self._index = open_index(folder / INDEX)
        self._writes: SimpleQueue[_Write | Callable[[], object] | None] = SimpleQueue()
        self._writer = Thread(target=self._work, name="radixcache-kv-writer", daemon=True)
        self._writer.start()
        self._readers = ThreadPoolExecutor(_READERS, "radixcache-kv-reader")

    # -- what the engine's thread calls -----------------------------------------------------------

    def stored(self) -> list[StoredPage]:
        """What the manifest tells, least recently used first; rows that make no sense go. To be
        called once, before anything else."""
        found: dict[bytes, StoredPage] = {}
        columns = "slot, parent, key, tokens, checksum"
        rows = self._index.execute(f"select {columns} from pages order by last_use").fetchall()
        for slot, parent, key, tokens, checksum in rows:
            known = (len(parent), len(key), len(checksum)) == (16, 16, 16) and key not in found
            size = 4 * self._pool.page_size
            if known and slot in range(self.num_slots) and len(tokens) in range(4, size + 1, 4):
                found[key] = StoredPage(
                    slot, parent, key, np.frombuffer(tokens, np.int32), "stored"
                )
                self._checksums[slot] = checksum
        left = [(slot,) for slot, *_ in rows if slot not in self._checksums]
        with self._index:
            self._index.executemany("delete from pages where slot = ?", left)
        return [*found.values()]

    def save(self, pages: Sequence[int], stored: Sequence[StoredPage]) -> None:
        size = len(pages) * self.page_bytes
        with self._lock:
            full = self._queued + size > MAX_QUEUED_BYTES
            self._queued += 0 if full else size
        if full:
            for page in stored:
                page.state = "lost"
            self._count(dropped_pages=len(pages))
            return
        try:
            self._writes.put(_Write(self._pool.read_pages(np.array(pages)), stored))
        except Exception as error:  # for want of memory
            for page in stored:
                page.state = "lost"
            self._failed(len(pages), error)

    def read(self, pages: Sequence[StoredPage]) -> Future[torch.Tensor]:
        """[n, page_bytes] uint8: the bytes of as many of `pages` as are what they were, the first
        ones; the next is "lost" then."""
        return self._readers.submit(self._read, [*pages])

    def clear(self) -> None:
        self._writes.put(self._forget)

    def flush(self) -> None:
        """Wait until all that was saved is written, or lost."""
        done: Future[None] = Future()
        self._writes.put(lambda: done.set_result(None))
        done.result()

    def note(self, name: str, value: str) -> None:
        """Keep a text of that name, for the next process."""
        replace, row = "insert or replace into notes values (?, ?, ?)", (name, value)
        checksum = xxhash.xxh3_128(value.encode()).digest()
        self._writes.put(lambda: self._index.execute(replace, (*row, checksum)))

    def notes(self) -> dict[str, str]:
        """The texts that were kept, and are what they were. To be called once, before anything
        else."""
        rows = self._index.execute("select name, value, checksum from notes")
        return {n: text for n, text, c in rows if xxhash.xxh3_128(text.encode()).digest() == c}

    def close(self, in_order: Iterable[StoredPage]) -> None:
        """Write what waits, and the order in which pages are to be evicted; end the threads."""
        slots = [(at, page.slot) for at, page in enumerate(in_order)]
        update = "update pages set last_use = ? where slot = ?"
        self._writes.put(lambda: self._index.executemany(update, slots))
        self._writes.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._index.close()
        os.close(self._file)

    # -- threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Do what is in the queue, in order; writes that wait together are synced together."""
        ends = False
        while not ends:
            jobs = [self._writes.get()]
            while not self._writes.empty():
                jobs.append(self._writes.get())
            for are_writes, some in groupby(jobs, lambda job: isinstance(job, _Write)):
                if are_writes:
                    self._write([*cast(Iterable[_Write], some)])
                else:
                    for job in cast(Iterable[Callable[[], object] | None], some):
                        ends |= job is None
                        self._run(job)

    def _run(self, job: Callable[[], object] | None) -> None:
        try:
            if job is not None:
                with self._index:
                    job()
        except (OSError, sqlite3.Error) as error:
            self._failed(0, error)

    def _write(self, writes: Sequence[_Write]) -> None:
        pages = [page for write in writes for page in write.stored]
        state: Literal["stored", "lost"] = "lost"
        try:
            for page in pages:
                self._checksums.pop(page.slot, None)
            with self._index:
                slots = [(page.slot,) for page in pages]
                self._index.executemany("delete from pages where slot = ?", slots)
            rows = [row for write in writes for row in write.rows.numpy()]
            for page, row in zip(pages, rows, strict=True):
                _write_all(self._file, row, page.slot * self.page_bytes)
            _sync(self._file)
            found = [_checksum(page.key, row) for page, row in zip(pages, rows, strict=True)]
            with self._index:
                last = "(select coalesce(max(last_use), 0) + 1 from pages)"
                self._index.executemany(
                    f"insert or replace into pages values (?, ?, ?, ?, ?, {last})",
                    [
                        (page.slot, page.parent, page.key, page.tokens.tobytes(), checksum)
                        for page, checksum in zip(pages, found, strict=True)
                    ],
                )
            self._checksums.update((p.slot, c) for p, c in zip(pages, found, strict=True))
            self._count(stored_pages=len(pages))
            state = "stored"
        except (OSError, sqlite3.Error) as error:
            self._failed(len(pages), error)
        finally:
            for page in pages:
                page.state = state
            with self._lock:
                self._queued -= sum(write.rows.nbytes for write in writes)

    def _read(self, pages: list[StoredPage]) -> torch.Tensor:
        rows = torch.empty(len(pages), self.page_bytes, dtype=torch.uint8)
        data, num_good = rows.numpy(), len(pages)
        for at, page in enumerate(pages):  # those after a spoilt one, too: all that are get known
            error = OSError(f"slot {page.slot} does not hold what was written")
            try:
                good = _read_all(self._file, data[at], page.slot * self.page_bytes)
                good = good and _checksum(page.key, data[at]) == self._checksums.get(page.slot)
            except OSError as raised:
                good, error = False, raised
            if not good:
                page.state, num_good = "lost", min(num_good, at)
                self._failed(1, error)
        self._count(loaded_pages=num_good)
        return rows[:num_good]

    def _forget(self) -> None:
        self._checksums.clear()
        self._index.execute("delete from pages")
        self._index.execute("delete from notes")

    def _count(self, **more: int) -> None:
        with self._lock:
            now = self.counters._asdict()
            self.counters = Counters(**{n: count + more.get(n, 0) for n, count in now.items()})

    def _failed(self, count: int, error: Exception) -> None:
        self._count(failed_pages=count)
        if not self._warned:
            self._warned = True
            what = first_sentence(error)
            _log.warning("KV pages in %s are lost, and computed again: %s", self._folder, what)


def open_index(path: Path) -> sqlite3.Connection:
    """The manifest of that name; a new one if there is none, or none that can be read."""
    for _ in range(2):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files this
        index = sqlite3.connect(path, check_same_thread=False)
        try:
            index.execute("pragma journal_mode = wal")
            index.execute("pragma synchronous = normal")
            index.executescript(_SCHEMA)
            index.execute("select slot, parent, key, tokens, checksum, last_use from pages limit 1")
            index.execute("select name, value, checksum from notes limit 1")
            return index
        except sqlite3.Error as error:
            index.close()
            _log.warning("the manifest %s is begun anew: %s", path, first_sentence(error))
            for name in (path, *path.parent.glob(f"{path.name}-*")):
                name.unlink(missing_ok=True)
    raise InvalidRequest(f"{path} cannot be written")


def remove_others(kv_dir: Path, own: Path) -> None:
    """Remove the pages of other models from `kv_dir`, whose size is for one; what is no folder of a
    model is left alone."""
    for folder in kv_dir.iterdir():
        if folder != own and (folder / PAGES).exists():
            _log.warning("%s is removed: KV pages of another model, dtype or version", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _make_room(file: int, size: int) -> None:
    """Make the file that long, on blocks of its own: a full disk is noticed now."""
    os.ftruncate(file, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)


_sync = getattr(os, "fdatasync", os.fsync)


def _checksum(key: bytes, row: np.ndarray) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(row.data)
    return digest.digest()


def _write_all(file: int, row: np.ndarray, start: int) -> None:
    data = row.data
    while data:
        count = os.pwrite(file, data, start)
        data, start = data[count:], start + count


def _read_all(file: int, row: np.ndarray, start: int) -> bool:
    """Whether the file is that long."""
    data = row.data
    while data:
        count = os.preadv(file, [data], start)
        if not count:
            return False
        data, start = data[count:], start + count
    return True
