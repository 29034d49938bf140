"""The folder of pages on disk: whose it is, who may read it, and what is left in it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixcache import Busy, InvalidRequest
from radixcache.runtime.cli import main
from radixcache.runtime.kv_offload import disk, files
from radixcache.runtime.kv_offload.disk import confirm_gone
from radixcache.runtime.kv_offload.files import INDEX, PAGES, free_folder, lock_folder, unlock
from tests.helpers.hash_model import greedy
from tests.helpers.tiers import Disk, in_a_process

TEXT = [*range(1, 26)]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    held = lock_folder(tmp_path / "kv")

    def second() -> None:
        with pytest.raises(InvalidRequest, match="in use by another process"):
            lock_folder(tmp_path / "kv")

    assert in_a_process(second) == 0
    os.close(held)
    os.close(lock_folder(tmp_path / "kv"))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot be used"):
        lock_folder(tmp_path / "file")


def test_each_replica_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From when it is chosen, for a model takes long to load; also if the shell left a `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(files, "_reserved", {})
    assert free_folder(tmp_path) == tmp_path / "0"

    def other() -> None:
        files._reserved.clear()
        assert free_folder(Path("~")) == tmp_path / "1"

    assert in_a_process(other) == 0
    unlock(lock_folder(tmp_path / "0"))
    assert free_folder(tmp_path) == tmp_path / "0"
    assert free_folder(tmp_path) == tmp_path / "1"
    with pytest.raises(InvalidRequest, match=r"no folder in it is free \(kv_dir .*/255 cannot be"):
        free_folder(tmp_path / "0" / "lock")


@pytest.mark.parametrize("name", [PAGES, INDEX])
def test_a_link_or_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / name).symlink_to(tmp_path / "other")
    with pytest.raises(InvalidRequest):
        Disk(tmp_path / "kv")
    assert (tmp_path / "other").read_text() == "of somebody else"
    (tmp_path / "kv" / name).unlink()
    (tmp_path / "kv" / name).mkdir()
    with pytest.raises(InvalidRequest):
        Disk(tmp_path / "kv")


@pytest.mark.parametrize("left", [(PAGES,), (INDEX,), ()])
@pytest.mark.parametrize("by", ["clear", "another model"])
def test_what_a_kill_has_left_of_a_folder_is_removed(
    tmp_path: Path, left: tuple[str, ...], by: str
) -> None:
    (folder := tmp_path / ("0a" * 16)).mkdir()
    for name in left:
        (folder / name).touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "lock").touch()
    assert files.contents(tmp_path) == []
    files.clear(tmp_path) if by == "clear" else files.remove_others(tmp_path, tmp_path / "1", "")
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "other"}


def test_a_lock_ends_with_its_owner_though_a_fork_lives_on(tmp_path: Path) -> None:
    lock, (ends, end) = lock_folder(tmp_path / "kv"), os.pipe()
    if not (child := os.fork()):
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    unlock(lock)
    unlock(lock_folder(tmp_path / "kv"))
    os.close(end)
    os.waitpid(child, 0)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    os.close(lock_folder(tmp_path / "kv"))
    engine = Disk(tmp_path / "kv" / "model")
    engine.answer(TEXT)
    engine.store.flush()
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*")}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    engine.close()


def test_a_manifest_that_is_locked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a backup, for example; or the disk is full."""
    first = Disk(tmp_path)
    first.answer(TEXT)
    first.close()
    other = sqlite3.connect(tmp_path / INDEX)
    other.execute("pragma locking_mode = exclusive")
    other.execute("begin exclusive")
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0))
        before = {*os.listdir("/proc/self/fd")} if os.path.isdir("/proc/self/fd") else None
        with pytest.raises(InvalidRequest, match="cannot be used: database is locked"):
            Disk(tmp_path)
    other.close()  # whose process SQLite lets go of no file before
    if before is not None:
        assert {*os.listdir("/proc/self/fd")} <= before, "a descriptor is left"
    assert Disk(tmp_path).answer(TEXT) == (greedy(TEXT, 4), len(TEXT) - 1)


def test_a_fork_that_outlives_a_killed_process_keeps_no_folder_locked(tmp_path: Path) -> None:
    read, write = os.pipe()

    def lock_fork_and_be_killed() -> None:
        lock_folder(tmp_path)
        if not os.fork():
            os.read(read, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_process(lock_fork_and_be_killed) == -signal.SIGKILL
    try:
        unlock(lock_folder(tmp_path))  # InvalidRequest, if it is in use
    finally:
        os.write(write, b"x")
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("run", range(6))
def test_what_was_said_to_be_gone_or_kept_is_after_a_kill(tmp_path: Path, run: int) -> None:
    """Gone from every file, too."""
    texts = {f"note{i}": f"secret-{run}-{i}-" * 500 for i in range(4)}

    def note_and_be_killed() -> None:
        store = Disk(tmp_path).store
        for name, text in texts.items():
            store.note(name, text).result(30)
        if run % 2:
            store.clear()
            assert store.cleared is not None
            confirm_gone(store.cleared)
        else:
            for name in [*texts][: run // 2 + 1]:
                confirm_gone(store.drop_note(name))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_process(note_and_be_killed) == -signal.SIGKILL
    kept = set() if run % 2 else {*[*texts][run // 2 + 1 :]}
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert {name for name in texts if texts[name][:12].encode() in found} == kept
    engine = Disk(tmp_path)
    assert {name: text for name, text in engine.store.notes().items() if name in texts} == {
        name: texts[name] for name in kept
    }
    engine.close()


def test_what_is_not_gone_in_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_GONE_SECONDS", 0.01)
    with pytest.raises(Busy, match="the disk still holds it: it takes long"):
        confirm_gone(Future())
    engine = Disk(tmp_path)
    engine.close()
    with pytest.raises(Busy, match="the store is closed"):
        confirm_gone(engine.store.drop_note("a"))


def test_pages_that_a_process_writes_while_they_are_verified_are_not_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlock(lock_folder(tmp_path))
    engine = Disk(folder := tmp_path / ("0c" * 16), slots=7)
    engine.store.note("about", json.dumps({"model": "", "page_bytes": engine.store.page_bytes}))

    def fill(start: int) -> None:
        engine.put_down([start, *TEXT])
        engine.store.flush()

    def later(rows: list[Any]) -> Iterator[Any]:
        fill(5)
        return iter(rows)

    fill(3)
    assert files.verify(tmp_path, iter) == (7, 0) == files.verify(tmp_path, later)
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "pages that were read: 7; all are right\n"
    (folder / PAGES).write_bytes(bytes(7 * engine.store.page_bytes))
    assert files.verify(tmp_path, iter) == (7, 7)
    engine.close()
    found = files.contents(tmp_path)
    (folder / PAGES).unlink()
    monkeypatch.setattr(files, "contents", lambda _: found)
    with pytest.raises(InvalidRequest, match=r"0c cannot be read: .* No such file"):
        files.verify(tmp_path, iter)
