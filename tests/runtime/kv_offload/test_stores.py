"""What every store of pages does below a pool, in memory, on a disk, in host memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers.hash_model import greedy, hash_engine
from tests.helpers.tiers import Disk, HostMemory, Pinned, Tiers, pinning_cuda

TEXT = [*range(1, 26)]


@pytest.fixture(params=["memory", "disk", "disk below memory", "host", "disk below host"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tiers]:
    """Engines with much room below the pool, and engines whose pages go on to the second tier."""
    match request.param:
        case "memory":
            engine = hash_engine("radix", 4, 40)
            made = Tiers(engine, HostMemory(engine.kv_pool, 300), None)
            made.offload.loads.note_step = lambda *_: None  # type: ignore[method-assign]
            yield made
        case "disk":
            yield Disk(tmp_path)
        case "disk below memory":
            yield Disk(tmp_path, above=3)
        case kind:
            with pinning_cuda() as device:
                above = {"host": 300, "disk below host": 3}[kind]
                yield Pinned(device, slots=above, folder=None if above > 3 else tmp_path)


def test_what_was_evicted_is_loaded_to_the_token(tiers: Tiers) -> None:
    assert tiers.answer(TEXT) == (greedy(TEXT, 4), 0)
    tiers.evict_all()
    assert tiers.answer(TEXT) == (greedy(TEXT, 4), len(TEXT) - 1)
    again = [*TEXT[:18], 3, 3, 3]
    assert tiers.answer(again) == (greedy(again, 4), 0), "in the pool by now"
    tiers.evict_all()
    branch = [*TEXT[:18], 4, 4, 4]
    assert tiers.answer(branch) == (greedy(branch, 4), 18), "in mid-page"
    assert tiers.engine.lifetime_stats.loaded_tokens == len(TEXT) - 1 + 18
    tiers.close()


def test_a_reset_leaves_nothing_to_load(tiers: Tiers) -> None:
    tiers.answer(TEXT)
    tiers.evict_all()
    assert any(map(len, tiers.offload.tiers))
    tiers.engine.reset_cache()
    assert not any(map(len, tiers.offload.tiers))
    assert tiers.answer(TEXT) == (greedy(TEXT, 4), 0)
    tiers.close()


def test_an_eviction_that_is_cut_off_empties_the_pool_alone(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.put_down(TEXT)
    tiers.answer([5] * 20)
    tiers.flush()
    with monkeypatch.context() as patched:
        patched.setattr(tiers.offload.tiers[0], "_add", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            tiers.engine.cache.evict(1)
    tiers.engine.recover()
    tiers.engine.check()
    assert tiers.answer(TEXT) == (greedy(TEXT, 4), len(TEXT) - 1)
    tiers.close()
