"""Loads that take their time, while others run or something else happens."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from radixcache import SamplingParams
from radixcache.runtime.kv_offload import loads
from radixcache.tiers.stored_pages import StoredPage
from tests.helpers.engines import generated
from tests.helpers.hash_model import greedy
from tests.helpers.tiers import Disk

TEXT = [*range(1, 26)]


def test_what_was_being_read_when_the_cache_was_reset_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.put_down(TEXT)
    disk.store.flush()
    read, late = disk.store.read, Future[torch.Tensor]()
    monkeypatch.setattr(disk.store, "read", lambda _: late)
    pages, _ = disk.tier.find(np.array(TEXT, np.int32), 0)
    request = disk.engine.add_request(TEXT, SamplingParams(temperature=0, max_tokens=4))
    disk.engine.step()
    rows = read(pages).result()
    assert len(rows) == len(pages) and not request.finished
    disk.engine.reset_cache()
    late.set_result(rows)
    while not request.finished:
        disk.engine.step()
    assert generated([request]) == [[greedy(TEXT, 4)]]
    assert request.output().num_cached_tokens == 0
    disk.close()


Late = list[tuple[list[StoredPage], Any]]
"""Pages that are asked for, each with the future of what is read."""


def read_late(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Late:
    """What is read from now on comes when the test says so."""
    late: Late = []

    def slowly(pages: list[StoredPage]) -> Future[torch.Tensor]:
        late.append((pages, Future()))
        return late[-1][1]

    monkeypatch.setattr(disk.store, "read", slowly)
    return late


def test_a_request_that_waits_for_loads_is_looked_up_when_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in each step, which would hold up those that run."""
    disk = Disk(tmp_path, num_pages=100)
    texts = [[start, *TEXT] for start in range(7)]
    disk.put_down(*texts)
    disk.store.flush()
    read, find = disk.store.read, Mock(wraps=disk.tier.find)
    late = read_late(disk, monkeypatch)
    monkeypatch.setattr(disk.tier, "find", find)

    params = SamplingParams(temperature=0, max_tokens=4)
    requests = [disk.engine.add_request(text, params) for text in texts]
    for _ in range(5):
        disk.engine.step()
    assert find.call_count == len(texts) and len(late) == disk.store.most_loading
    while not all(request.finished for request in requests):
        if late:
            pages, rows = late.pop(0)
            rows.set_result(read(pages).result())
        disk.engine.step()
        disk.engine.check()
    assert [request.output().num_cached_tokens for request in requests] == [len(TEXT)] * 7
    assert generated(requests) == [[greedy(text, 4)] for text in texts]
    disk.close()


@pytest.mark.parametrize("more", [[], [28, 27, 26]])
@pytest.mark.parametrize("apart", [12, 17, 25])
def test_a_load_that_is_aborted_goes_to_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: int, more: list[int]
) -> None:
    """Nothing is read twice, and the engine waits where it has nothing to compute. One of them may
    go on otherwise than the other from `apart` on, or be longer."""
    disk = Disk(tmp_path, num_pages=100)
    texts = [[*TEXT], [*TEXT[:apart], *[0] * (25 - apart), *more]]
    disk.put_down(*texts)
    disk.store.flush()
    read, waited = disk.store.read, Mock(wraps=wait)
    late = read_late(disk, monkeypatch)
    monkeypatch.setattr(loads, "wait", waited)
    written, rated = (
        Mock(wraps=disk.engine.kv_pool.write_pages),
        Mock(wraps=disk.store.copying.note),
    )
    monkeypatch.setattr(disk.engine.kv_pool, "write_pages", written)
    monkeypatch.setattr(disk.store.copying, "note", rated)

    params = SamplingParams(temperature=0, max_tokens=4)
    gone, other = (disk.engine.add_request(text, params) for text in texts)
    disk.engine.step()
    disk.engine.abort(gone)
    for _ in range(3):
        disk.engine.step()
        assert late[0][1] in waited.call_args.args[0]
    done = 0
    while not other.finished:
        for pages, rows in late[done:]:
            rows.set_result(read(pages).result())
            done += 1
        disk.engine.step()
        disk.engine.check()
    pages = [page for pages, _ in late for page in pages]
    assert len({*map(id, pages)}) == len(pages), "read twice"
    sizes = [call.args[1].nbytes for call in written.call_args_list]
    assert [call.args[0] for call in rated.call_args_list] == sizes, "rated by what was not copied"
    assert other.output().num_cached_tokens == len(texts[1]) - 1
    assert generated([other]) == [[greedy(texts[1], 4)]]
    disk.close()


def test_who_waits_for_a_load_whose_end_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.put_down(TEXT)
    disk.store.flush()
    params = SamplingParams(temperature=0, max_tokens=4)
    requests = [disk.engine.add_request(TEXT, params) for _ in range(2)]
    cut = Mock(side_effect=MemoryError)
    with monkeypatch.context() as patched:
        patched.setattr(disk.tier, "_use", cut)
        while not cut.called:
            with suppress(MemoryError):
                disk.engine.step()
    for _ in range(20):
        disk.engine.step()
    assert generated(requests) == [[greedy(TEXT, 4)]] * 2
    disk.close()
