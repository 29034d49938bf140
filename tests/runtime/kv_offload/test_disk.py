"""Pages on disk: whatever happens to the files, a token is computed rather than wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from radixcache import InvalidRequest
from radixcache.runtime.kv_offload import disk, files
from radixcache.runtime.kv_offload.files import INDEX, PAGES, write_all
from radixcache.runtime.kv_offload.notes import ABOUT, PREFIXES
from radixcache.runtime.model.kv_pool import KVPool, LayerShape, WindowLayout
from tests.helpers.cover import seeds
from tests.helpers.hash_model import greedy
from tests.helpers.tiers import Asker, Disk, draw_windows, in_a_process, window_pages
from tests.helpers.traffic import play

TEXT = [*range(1, 26)]


@seeds(20_261_152, 20)
def test_random_requests_over_restarts_get_the_tokens_of_their_own_texts(tmp_path: Path, seed: int):
    rng, total = Random(seed), Counter[str]()
    asker, page_size = Asker(rng), rng.choice([1, 3, 4, 16])
    windows = draw_windows(rng)
    for _ in range(4):
        tokens, step = rng.choice([130, 170, 400]), rng.choice([7, 30, 200])
        engine = Disk(
            tmp_path,
            page_size,
            -(-tokens // page_size) + 2 + window_pages(windows, step, rng),
            slots=rng.choice([20, 300]),
            above=rng.choice([0, 3, 30]),
            max_num_batched_tokens=step,
            max_num_seqs=rng.choice([1, 4, 8]),
            windows=windows,
        )
        total += play(
            engine.engine, rng, 45, asker.after(engine.store.flush), asker.verify,
            arrivals=0.2, failures=0.04, resets=0.003,
        )  # fmt: skip
        total["loaded"] += engine.engine.lifetime_stats.loaded_tokens
        total["failed"] += engine.store.counters.failed_pages
        if windows is not None:
            model: Any = engine.engine.model
            assert not model.wrong_windows and not model.unwritten
            total["windows loaded"] += engine.windows_loaded
        engine.close()
        spoil(tmp_path / PAGES, rng)
    print(f"seed {seed}: {dict(total)}")
    if seed == 20_261_152:
        assert total["loaded"] > 20


def spoil(path: Path, rng: Random) -> None:
    """Flip some bits."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([0, 3])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / PAGES).read_bytes())
    data[disk_bytes(folder, 0)] ^= 16
    (folder / PAGES).write_bytes(data)


def disk_bytes(folder: Path, position: int) -> int:
    """Where the token at a position of `TEXT` is."""
    with sqlite3.connect(folder / INDEX) as index:
        slots = [slot for (slot,) in index.execute("select slot from pages order by last_use desc")]
    return 32 * int(slots[position // 4])


def cut_off(folder: Path) -> None:
    os.truncate(folder / PAGES, 16)


def swap_slots(folder: Path) -> None:
    data = (folder / PAGES).read_bytes()
    slots = [data[at : at + 32] for at in range(0, len(data), 32)]
    (folder / PAGES).write_bytes(b"".join(reversed(slots[:7])) + b"".join(slots[7:]))


def spoil_the_manifest(folder: Path) -> None:
    (folder / INDEX).write_bytes(b"SQLite format 3\0" + b"nonsense" * 500)


def remove_the_manifest(folder: Path) -> None:
    for path in folder.glob(f"{INDEX}*"):
        path.unlink()


def other_schema(folder: Path) -> None:
    remove_the_manifest(folder)
    with sqlite3.connect(folder / INDEX) as index:
        index.execute("create table pages (slot integer)")


def other_tokens(folder: Path) -> None:
    """Rows that say that other texts are there."""
    with sqlite3.connect(folder / INDEX) as index:
        rows = index.execute("select slot, checksum from pages").fetchall()
        for (slot, _), (_, checksum) in zip(rows, reversed(rows), strict=True):
            index.execute("update pages set checksum = ? where slot = ?", (checksum, slot))


def nonsense_rows(folder: Path) -> None:
    with sqlite3.connect(folder / INDEX) as index:
        index.execute("update pages set tokens = x'00', key = x'01'")
        index.execute("update pages set slot = -1, parent = 1.5 where slot = 0")
        index.execute("update notes set value = x'00ff'")


FAULTS = [
    flip_a_bit, cut_off, swap_slots, spoil_the_manifest, remove_the_manifest, other_schema,
    other_tokens, nonsense_rows,
]  # fmt: skip


def test_rows_that_say_that_other_tokens_are_there_are_not_believed(tmp_path: Path) -> None:
    """Nor where only the beginning of a page is asked for, which no key stands for."""
    first, texts = Disk(tmp_path), ([27, *TEXT], TEXT)
    for text in texts:
        first.answer(text)
    first.close()
    before, after = (np.array(tokens, np.int32).tobytes() for tokens in (TEXT[:4], [1, 2, 3, 27]))
    others = blake2b(np.array([27, 1, 2, 3], np.int32).tobytes(), digest_size=16).digest()
    with sqlite3.connect(tmp_path / INDEX) as index:
        changes = [
            index.execute("update pages set tokens = ? where tokens = ?", (after, before)),
            index.execute(
                "update pages set parent = ? where tokens = ?",
                (others, np.array(TEXT[4:8], np.int32).tobytes()),
            ),
        ]
        assert [change.rowcount for change in changes] == [1, 1]
    for text, right in (([1, 2, 3, 27, 5], 0), ([27, 1, 2, 3, 5, 6, 7, 9], 4)):
        engine = Disk(tmp_path)
        assert engine.answer(text) == (greedy(text, 4), right)
        engine.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_spoiled_files_cost_no_more_than_computing(tmp_path: Path, fault: Callable[[Path], None]):
    first = Disk(tmp_path)
    first.answer(TEXT)
    first.close()
    fault(tmp_path)
    for _ in range(2):  # the second one finds in order what the first one has left
        engine = Disk(tmp_path)
        tokens, loaded = engine.answer(TEXT)
        assert tokens == greedy(TEXT, 4)
        engine.close()
    assert loaded == len(TEXT) - 1


@pytest.mark.parametrize("call", ["pwrite", "preadv", "sync"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "ENOSPC"), MemoryError()], ids=repr)
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    """Now and then, in any call."""
    rng, count = Random(5), 0
    real = getattr(files if call == "sync" else os, call)

    def fails(*args: object) -> object:
        nonlocal count
        if rng.random() < 0.3:
            count += 1
            raise error
        return real(*args)

    monkeypatch.setattr(files if call == "sync" else os, call, fails)
    engine = Disk(tmp_path, num_pages=20)
    for number in range(40):
        text = [number % 9, *TEXT]
        assert engine.answer(text)[0] == greedy(text, 4)
        engine.store.flush()
    assert count and engine.store.counters.failed_pages
    assert engine.engine.lifetime_stats.loaded_tokens, "what the disk has kept is used"
    engine.close()


def test_a_full_disk_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidRequest, match=r"cannot hold .* No space left on device"):
        Disk(tmp_path)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_what_the_disk_is_too_slow_for_is_kept_at_the_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    go_on = threading.Event()

    def write_later(*what: Any) -> None:
        assert go_on.wait(60)
        write_all(*what)

    monkeypatch.setattr(disk, "write_all", write_later)
    monkeypatch.setattr(disk, "MAX_QUEUED_BYTES", 64)
    monkeypatch.setattr(disk, "_WRITTEN_BYTES", 32)
    engine = Disk(tmp_path)
    engine.answer(TEXT)
    if not at_the_end:
        engine.engine.cache.evict(40)
        assert engine.store.counters.dropped_pages
    threading.Timer(0.05, go_on.set).start()
    engine.close()
    length = len(TEXT) - 1 if at_the_end else 8  # what two pages hold
    assert Disk(tmp_path).answer(TEXT) == (greedy(TEXT, 4), length)


def traffic(folder: Path, seed: int) -> None:
    rng = Random(seed)
    asker = Asker(Random(seed % 3))  # the same texts in several processes
    engine = Disk(folder, num_pages=35, slots=60, max_num_seqs=4)
    play(engine.engine, rng, 60, asker.ask, asker.verify, arrivals=0.3, failures=0.02, resets=0)
    engine.close()


def test_killed_at_any_write(tmp_path: Path) -> None:
    """Before and after each call that writes, until there is none left to be killed at."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")

    def work(limit: int) -> None:
        count = 0

        def dying(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                nonlocal count
                for _ in range(2):
                    count += 1
                    if count == limit:
                        os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            return call

        os.pwrite = dying(os.pwrite)  # type: ignore[assignment]
        files.sync = dying(files.sync)
        traffic(tmp_path, limit)

    killed = 0
    for limit in range(1, 300, 33):
        status = in_a_process(lambda limit=limit: work(limit))
        assert status in (0, -signal.SIGKILL)
        killed += status != 0
    assert killed > 2  # how much is written at once is for threads to say
    assert in_a_process(lambda: traffic(tmp_path, 1)) == 0


def test_a_reset_on_a_full_disk_leaves_no_text_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Disk(tmp_path)
    first.put_down(TEXT)
    first.store.note("texts", "a secret")
    with monkeypatch.context() as patched:
        patched.setattr(disk, "make_room", lambda *_: os.open("/dev/null/x", os.O_RDWR))
        first.engine.reset_cache()
        first.store.flush()
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert not left[PAGES] and not any(b"a secret" in data for data in left.values())
    with sqlite3.connect(tmp_path / INDEX) as index:
        assert index.execute("select count(*) from pages").fetchall() == [(0,)]
    assert first.answer(TEXT) == (greedy(TEXT, 4), 0)
    first.close()
    assert Disk(tmp_path).answer(TEXT) == (greedy(TEXT, 4), len(TEXT) - 1)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_reset_holds_though_the_manifest_cannot_be_written(tmp_path: Path, at_the_end: bool):
    """What is left in it goes at the end, or when another has let go of it."""
    first = Disk(tmp_path)
    first.put_down(TEXT)
    first.store.flush()
    execute = first.store._index.execute
    first.store._on_thread(lambda: execute("pragma busy_timeout = 1"))
    with sqlite3.connect(tmp_path / INDEX) as other:
        if at_the_end:
            first.store._on_thread(lambda: execute("pragma query_only = on"))
        else:
            other.execute("begin immediate")
        first.engine.reset_cache()
        first.store.flush()
        first.store._on_thread(lambda: execute("pragma query_only = off"))
        other.rollback()
    first.close()
    with sqlite3.connect(tmp_path / INDEX) as index:
        assert index.execute("select count(*) from pages").fetchall() == [(0,)]
    assert Disk(tmp_path).answer(TEXT) == (greedy(TEXT, 4), 0)


@pytest.mark.parametrize("windows", [None, WindowLayout(9, 4, (False, True, False))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_hold_each_layers_page_and_bring_it_back(
    dtype: torch.dtype, windows: WindowLayout | None
) -> None:
    shapes, cpu = (
        [LayerShape(2, 4, 3), LayerShape(2, 3, 3), LayerShape(1, 4, 4)],
        torch.device("cpu"),
    )
    pool, other = (KVPool(shapes, 6, 5, dtype, cpu, windows) for _ in range(2))
    for tensor in (tensor for layer in pool.layers for tensor in layer):
        tensor.copy_(torch.randn(tensor.shape))
    pages = np.array([4, 0, 5])
    rows = pool.read_pages(pages)
    assert rows.shape == (3, pool.page_bytes)
    for page, row in zip(pages, rows, strict=True):
        if windows is not None:  # a page is of the full layers, or of the one with a window
            break
        parts = [tensor[page].flatten() for layer in pool.layers for tensor in layer]
        assert sorted(row.view(dtype).tolist()) == sorted(torch.cat(parts).tolist())
    assert torch.equal(rows, pool.gather_pages(pages)), "as on a GPU"
    targets = np.array([1, 2, 0])
    other.write_pages(targets, rows)
    for mine, theirs in zip(pool.layers, other.layers, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a[pages], b[targets]) and not b[3:].any()
    assert len(pool.read_pages(pages[:0])) == 0


def test_a_folder_that_is_removed_while_it_is_used(tmp_path: Path) -> None:
    engine = Disk(tmp_path / "kv", num_pages=20)
    engine.answer(TEXT)
    shutil.rmtree(tmp_path / "kv")
    for start in range(60):
        text = [start % 20, *TEXT]
        assert engine.answer(text)[0] == greedy(text, 4)
    engine.close()


def test_the_manifest_is_in_the_order_of_eviction_before_it_is_closed(tmp_path: Path) -> None:
    engine = Disk(tmp_path)
    for start in range(3):
        engine.put_down([start, *TEXT])
    engine.store.flush()
    query = engine.store._index.execute
    order = engine.store._on_thread(
        lambda: query("select slot from pages order by last_use").fetchall()
    )
    assert [slot for (slot,) in order] == [page.slot for page in engine.tier.in_order()]
    engine.close()


@pytest.mark.parametrize("cell", ["pages set tokens", "notes set value"])
def test_text_that_is_no_text_in_the_manifest_is_dropped(tmp_path: Path, cell: str) -> None:
    first = Disk(tmp_path)
    first.answer(TEXT)
    first.close()
    with sqlite3.connect(tmp_path / INDEX) as index:
        index.execute(f"update {cell} = cast(x'ffff' as text)")
    second = Disk(tmp_path)
    assert second.store.notes().keys() - {PREFIXES} == {ABOUT}
    assert second.answer(TEXT)[0] == greedy(TEXT, 4)
    second.close()
