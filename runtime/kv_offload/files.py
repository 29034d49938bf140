"""The files of KV pages on disk: one of slots, and a manifest of the pages in them. No torch.

    DIR/lock                        held by the process that uses the folder
    DIR/<fingerprint>/pages.kv      slot i is the bytes [i * page_bytes, (i + 1) * page_bytes)
    DIR/<fingerprint>/index.sqlite  a row for each slot in use

Models whose KV differs have different fingerprints, and so folders. The checksum of a page covers
its bytes and its row: its key, which stands for all tokens up to its end, its tokens, and the key
of the page before it. It is compared at each load. So whatever happens to the files (a crash, a
full disk, a changed bit, swapped slots), the worst is that a page is computed again; syncs only
decide how much survives. A row is deleted before its slot is written again, and inserted after the
bytes are written.

Files hold prompts and answers: folders are 0700, files 0600.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from radixcache.errors import InvalidRequest, RadixCacheError, first_sentence
from radixcache.runtime.config.sizes import format_memory
from radixcache.runtime.kv_offload.notes import (
    ABOUT,
    RESPONSE,
    AboutNote,
    read_prefixes,
    read_texts,
)

PAGES, INDEX, LOCK = "pages.kv", "index.sqlite", "lock"
_OF_SYSTEMS = {"lost+found", ".snapshot", ".snapshots", ".zfs", ".DS_Store"}

ROWS = "select slot, parent, key, tokens, checksum from pages"

_FINGERPRINT = re.compile("[0-9a-f]{32}")

_SCHEMA = """
create table if not exists pages (slot integer primary key, parent blob not null, key blob not null,
    tokens blob not null, checksum blob not null, last_use integer not null);
create table if not exists notes (name text primary key, value text not null, checksum blob);
"""

_PASSING = ("locked", "full", "I/O", "unable to open")
"""Words in SQLite's errors about a manifest that may be intact."""

_MOST_REPLICAS = 256

_reserved: dict[Path, int] = {}
"""Locks of folders that `free_folder` has chosen, and `lock_folder` has yet to return."""

_locks: set[int] = set()
"""The locks that this process holds."""

_log = logging.getLogger("radixcache")


def _leave_locks() -> None:
    """Close the locks in a fork, which could outlive this process and keep folders locked."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def lock_folder(folder: Path) -> int:
    """Make and lock `folder`; returns a file that keeps the lock until it is closed.

    Raises:
        InvalidRequest: the folder cannot be used, holds other files, or is in use.
    """
    if (reserved := _reserved.pop(folder, None)) is not None:
        return reserved
    try:
        import fcntl
    except ImportError:
        raise InvalidRequest("kv_dir needs file locks, which this system does not have") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [entry for entry in folder.iterdir() if entry.name not in _OF_SYSTEMS]
        inner = (files for entry in others for *_, files in os.walk(entry))
        holds = not all(entry.is_dir() for entry in others) or any(
            {*i} - _OF_SYSTEMS for i in inner
        )
        if holds and not (folder / LOCK).exists():
            raise InvalidRequest(f"kv_dir {folder} holds other files: name an empty folder")
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise InvalidRequest(f"kv_dir {folder} cannot be used: {reason}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InvalidRequest(f"kv_dir {folder} is in use by another process, or LLM") from None
    _locks.add(lock)
    return lock


def unlock(lock: int) -> None:
    import fcntl

    _locks.discard(lock)
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def is_locked(folder: Path) -> bool:
    """Whether a process uses the folder."""
    try:
        unlock(lock_folder(folder))
    except InvalidRequest:
        return True
    return False


def open_index(path: Path) -> sqlite3.Connection:
    """Open the manifest; make a new one if there is none, or if it cannot be read."""
    for _ in range(2):
        try:  # SQLite gives its other files the permissions of this one
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be used: {error.strerror}") from None
        index = sqlite3.connect(path, check_same_thread=False)
        index.text_factory = lambda data: data.decode(errors="replace")
        try:
            # A WAL keeps deleted rows, and crashes the process if its shared memory is truncated.
            index.execute("pragma journal_mode = delete")
            ((state,),) = index.execute("pragma quick_check(1)")
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            index.execute("pragma synchronous = normal")
            index.execute("pragma secure_delete = on")
            index.executescript(_SCHEMA)
            index.execute("select slot, parent, key, tokens, checksum, last_use from pages limit 1")
            index.execute("select name, value, checksum from notes limit 1")
            return index
        except sqlite3.Error as error:
            index.close()
            if is_passing(error):
                reason = first_sentence(error)
                raise InvalidRequest(f"{path} cannot be used: {reason}") from None
            _log.warning("the manifest %s is begun anew: %s", path, first_sentence(error))
            try:
                for name in (path, *path.parent.glob(f"{path.name}-*")):
                    name.unlink(missing_ok=True)
            except OSError as reason:
                raise InvalidRequest(f"{name} cannot be removed: {reason.strerror}") from None
    raise InvalidRequest(f"{path} cannot be written")


def is_passing(error: sqlite3.Error) -> bool:
    """Whether the manifest may be intact in spite of the error: then it is kept."""
    return any(word in str(error) for word in _PASSING)


def free_folder(kv_dir: Path) -> Path:
    """The folder of one of many replicas: the first of `kv_dir`/0, /1 and so on that is not in use.
    It stays locked for the next `lock_folder` of this process, while the model loads.

    Raises:
        InvalidRequest: there is none.
    """
    last = ""
    for number in range(_MOST_REPLICAS):
        folder = kv_dir.expanduser() / str(number)
        try:
            if folder not in _reserved:
                _reserved[folder] = lock_folder(folder)
                return folder
        except InvalidRequest as error:
            last = f" ({error})"
    raise InvalidRequest(f"kv_dir {kv_dir} cannot be used: no folder in it is free{last}")


def remove_others(kv_dir: Path, own: Path, about: str) -> None:
    """Remove the pages of models other than `about` from `kv_dir`, whose size is for one model;
    other files stay."""
    for folder in _models(kv_dir):
        if folder != own:
            found = None
            with suppress(RadixCacheError):
                found = _look(folder)
            if found is not None and found.num_tokens:
                why = f"it is for {about} now"
                if found.about == about:
                    why = "other weights, another radixcache or another machine wrote them"
                _log.warning(
                    "kv_dir %s: %s tokens are removed, of %s; %s",
                    kv_dir, f"{found.num_tokens:,}", found.about, why,
                )  # fmt: skip
            shutil.rmtree(folder, ignore_errors=True)


def make_room(file: int, size: int) -> None:
    """Set the size of a file and allocate its blocks, so that a full disk is noticed now."""
    before = os.fstat(file).st_size
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
    except OSError:
        os.ftruncate(file, before)
        raise


sync = getattr(os, "fdatasync", os.fsync)


def checksum_of(about: bytes, row: np.ndarray) -> bytes:
    """The checksum of a page: of its parent, key and tokens, joined, and of its bytes."""
    digest = xxhash.xxh3_128(about)
    digest.update(row.data)
    return digest.digest()


def write_all(file: int, row: np.ndarray, start: int) -> None:
    data = row.data
    while data:
        count = os.pwrite(file, data, start)
        data, start = data[count:], start + count


def read_all(file: int, row: np.ndarray, start: int) -> bool:
    """Fill `row` from position `start` of the file; False if the file ends before."""
    data = row.data
    while data:
        count = os.preadv(file, [data], start)
        if not count:
            return False
        data, start = data[count:], start + count
    return True


@dataclass(frozen=True)
class Contents:
    """Contents of a model's folder.

    Attributes:
        about: the model's name, its dtype and the size of a page.
        num_slots: pages that there is room for.
        texts, turns, responses: how many texts as they were tokenised, turns with tool calls, and
            stored responses of a server.
        prefixes: the names of pinned prefixes.
    """

    folder: Path
    about: str
    page_bytes: int
    num_slots: int
    num_pages: int
    num_tokens: int
    texts: int
    turns: int
    responses: int
    prefixes: list[str]


def contents(kv_dir: Path) -> list[Contents]:
    """The contents of `kv_dir`; `InvalidRequest` if no process has used it as such."""
    found = [_look(folder) for folder in _models(kv_dir) if (folder / INDEX).is_file()]
    return [one for one in found if one is not None]


def verify(kv_dir: Path, track: Callable[[list[_Row]], Iterator[_Row]]) -> tuple[int, int]:
    """Compare the checksums of all pages; returns how many there are, and how many are spoilt.

    Args:
        track: yields the given rows one by one, and may show progress.
    """
    count = spoilt = 0
    for found in contents(kv_dir):
        size = found.page_bytes
        row = np.empty(size, np.uint8)
        try:
            with _open(found.folder) as index, (found.folder / PAGES).open("rb") as file:
                for slot, *about, checksum in track(index.execute(ROWS).fetchall()):
                    count += 1
                    good = read_all(file.fileno(), row, slot * size)
                    good = good and {*map(type, about)} == {bytes}
                    if not (good and checksum_of(b"".join(about), row) == checksum):
                        # A process may have written another page there meanwhile.
                        now = index.execute(f"{ROWS} where slot = ?", (slot,)).fetchone()
                        spoilt += now == (slot, *about, checksum)
        except (OSError, sqlite3.Error) as error:  # removed meanwhile, for another model
            reason = first_sentence(error)
            raise InvalidRequest(f"{found.folder} cannot be read: {reason}") from None
    return count, spoilt


def clear(kv_dir: Path) -> None:
    """Remove the pages of all models; `InvalidRequest` while a process uses them, or without the
    permission."""
    models = _models(kv_dir)
    lock = lock_folder(kv_dir)
    try:
        for folder in models:
            shutil.rmtree(folder)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be removed: {error.strerror}") from None
    finally:
        unlock(lock)


_Row = tuple[int, bytes, bytes, bytes, bytes]


def _models(kv_dir: Path) -> list[Path]:
    """The folders of models, by their names: one may be incomplete, after a process was killed."""
    if not (kv_dir / LOCK).is_file():
        raise InvalidRequest(f"{kv_dir} is no folder that was used as kv_dir")
    return [folder for folder in sorted(kv_dir.iterdir()) if _FINGERPRINT.fullmatch(folder.name)]


def _open(folder: Path) -> sqlite3.Connection:
    """Open the manifest of a folder for reading; a removed one is not made anew."""
    return sqlite3.connect(f"{(folder / INDEX).absolute().as_uri()}?mode=rw", uri=True)


def _look(folder: Path) -> Contents | None:
    """The contents of a model's folder; None if the process that made it was killed at once."""
    try:
        with _open(folder) as index:
            tables = {name for (name,) in index.execute("select name from sqlite_master")}
            notes = (
                dict(index.execute("select name, value from notes")) if "notes" in tables else {}
            )
            if ABOUT not in notes:
                return None
            ((pages, tokens),) = index.execute(
                "select count(*), coalesce(sum(length(tokens) * (substr(tokens, 4, 1) < x'80')) / 4"
                ", 0) from pages"  # a window's tokens are negative, and none of a text
            )
        about, known = AboutNote(**json.loads(notes[ABOUT])), read_texts(notes)
        responses = [name for name in notes if name.startswith(RESPONSE)]
        prefixes = [prefix.name for prefix in read_prefixes(notes)]
        slots = (folder / PAGES).stat().st_size // about.page_bytes
    except (sqlite3.Error, OSError, KeyError, ValueError, TypeError) as error:
        reason = first_sentence(error)
        if isinstance(error, sqlite3.Error) and not is_passing(error):
            reason += "; the next start begins it anew"
        raise InvalidRequest(f"{folder} cannot be read: {reason}") from None
    return Contents(
        folder, *about, slots, pages, tokens, len(known.texts), len(known.turns), len(responses),
        prefixes,
    )  # fmt: skip


def describe(found: Contents) -> str:
    """Describe the contents of a folder, in some lines."""
    used, room = (format_memory(n * found.page_bytes) for n in (found.num_pages, found.num_slots))
    lines = {
        "model": found.about,
        "pages": f"{found.num_pages:,} of {found.num_slots:,}: {used} of {room}",
        "tokens": f"{found.num_tokens:,}",
        "texts": f"{found.texts:,} as they were tokenised, {found.turns:,} turns with tool calls",
        "responses": f"{found.responses:,}",
        "prefixes": ", ".join(found.prefixes) or "none",
    }
    return "\n".join([str(found.folder), *(f"  {name:10}{value}" for name, value in lines.items())])
