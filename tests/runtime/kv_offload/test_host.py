"""Pages in host memory below a GPU's pool, which is simulated: the answers are as without."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from radixcache import LLM, InvalidRequest, RadixCache, SamplingParams
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.engine import build
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.engine.memory_plan import plan_memory
from radixcache.runtime.engine.worker import Worker
from radixcache.runtime.kv_offload import host
from radixcache.runtime.kv_offload import loads as loads_module
from radixcache.runtime.kv_offload.disk import DiskStore
from radixcache.runtime.kv_offload.host import HostStore
from radixcache.runtime.kv_offload.offload import Offload
from radixcache.runtime.model.load import load_model
from radixcache.runtime.server.observe.metrics import engine_metrics
from radixcache.tiers.stored_pages import StoredPage
from tests.helpers import engines
from tests.helpers.cover import seeds
from tests.helpers.engines import plain_greedy
from tests.helpers.hash_model import greedy
from tests.helpers.models import tiny_model
from tests.helpers.simulated_cuda import CUDA
from tests.helpers.tiers import Asker, Pinned, PinnedDevice, pinning_cuda
from tests.helpers.traffic import play

TEXT = [*range(1, 26)]


@pytest.fixture
def device() -> Iterator[PinnedDevice]:
    with pinning_cuda() as device:
        yield device


@seeds(20_261_125, 8)
def test_random_requests_get_the_tokens_of_their_own_texts(
    device: PinnedDevice, monkeypatch: pytest.MonkeyPatch, seed: int, tmp_path: Path
) -> None:
    """With copies that fail, aborts, preemptions, failing steps and resets; without a disk below,
    and with one that outlives the process; all checks after every step."""
    rng, total = Random(seed), Counter[str]()
    asker = Asker(rng)
    kv = tmp_path / "kv"
    lives = [(1, None), (3, None), (1000, None), (1000, kv), (2, kv)]
    for most, folder in lives:  # pages of a load, and of a copy down
        page_size, tokens = rng.choice([1, 3, 4, 16]), rng.choice([130, 170, 400])
        if folder is not None:
            page_size, tokens = 4, 130
        if most == 3:  # somebody is put back, whatever a disk does
            tokens = 100
        size = page_size * 5 * 8
        monkeypatch.setattr(HostStore, "most_bytes", most * size)
        monkeypatch.setattr(host, "_DOWN", most * size)
        engine = Pinned(
            device,
            page_size,
            -(-tokens // page_size) + 2,
            slots=rng.choice([20, 300] if folder is None else [5, 20]),
            max_num_batched_tokens=rng.choice([7, 30, 200]),
            max_num_seqs=8 if most == 3 else rng.choice([1, 4, 8]),
            folder=folder,
        )
        assert engine.store.page_bytes == size
        device.failures, device.rng = 0.1 if most == 1 else rng.choice([0.0, 0.1]), rng
        total += play(
            engine.engine, rng, 30, asker.after(engine.flush), asker.verify,
            arrivals=0.2, failures=0.04, resets=0.003,
        )  # fmt: skip
        total["loaded"] += engine.engine.lifetime_stats.loaded_tokens
        for tier in engine.offload.tiers:
            counts = tier.store.counters._asdict()
            total.update({f"{tier.medium} {name}": n for name, n in counts.items()})
        engine.offload.close()
        assert not device.registered
    print(f"seed {seed}: {dict(total)}")
    if seed == 20_261_125:
        assert total["loaded"] > 20 and total["host failed_pages"] and total["preempted"]
        assert total["disk loaded_pages"] and total["disk stored_pages"]


def test_what_is_cheaper_to_compute_is_computed(device: PinnedDevice) -> None:
    engine = Pinned(device)
    loads = engine.offload.loads
    for speed, loaded in ((1e-9, 0), (1e-9, len(TEXT) - 1), (1e9, 0), (1e-9, len(TEXT) - 1)):
        for _ in range(200):  # outweigh what was measured
            loads.computing.note(10**6, 1e6 / speed)
        assert engine.answer(TEXT) == (greedy(TEXT, 4), loaded)
        pages, _ = engine.tier.find(np.array(TEXT, np.int32), 0)
        assert not pages or loads.cost("host", len(pages), 24).pays == (speed < 1)
        engine.evict_all()
    assert loads.cost("host", 7, 24).load is not None, "by the events around the copies"


def test_now_and_then_what_is_not_certain_is_decided_otherwise(device: PinnedDevice) -> None:
    """On a GPU a short prefill reads all weights, as a long one does, and says little of it."""
    engine = Pinned(device)
    loads, (tier,) = engine.offload.loads, engine.offload.tiers

    def decided(tokens: int = 4096) -> list[bool]:
        return [loads._is_to_be_loaded(tier, 1, tokens) for _ in range(32)]

    tier.store.copying.note(10**9 * engine.store.page_bytes, 1.0)
    tier.store.reading.note(engine.store.page_bytes, 0.1)
    assert decided() == [True] * 32, "nothing is known of computing"
    loads.computing.note(4096, 1e-9)
    assert decided() == [True] * 32, "the first step of a process says nothing"
    loads.computing.note(64, 0.01)  # 0.64 s for 4,096
    assert decided().count(False) == 2
    assert decided(64).count(True) == 2, "0.01 s: it does not pay"
    loads.computing.note(64, 10.0)
    assert decided() == [True] * 32, "however much faster a long prefill may be"
    for _ in range(99):
        loads.computing.note(64, 0.01)
    loads.computing.note(4096, 0.64)
    assert decided() == [True] * 32, "a long one is known by now"
    for _ in range(9):
        loads.computing.note(4096, 0.0)
    assert decided().count(True) == 2, "and is faster"
    engine.offload.close()


def test_what_eviction_takes_is_not_what_computing_takes(
    device: PinnedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load evicts as much."""
    save, clock, late = HostStore.save, time.perf_counter, [0.0]

    def slow(self: HostStore, *args: Any) -> None:
        save(self, *args)
        self.saving += 1e3
        late[0] += 1e3

    monkeypatch.setattr(HostStore, "save", slow)
    for module in (time, loads_module):
        monkeypatch.setattr(module, "perf_counter", lambda: clock() + late[0])
    engine = Pinned(device)
    loads = engine.offload.loads
    noted: list[float] = []
    monkeypatch.setattr(loads.computing, "note", lambda tokens, seconds: noted.append(seconds))
    for turn in range(12):  # six in turn, which the pool has no room for
        engine.answer([turn % 6, *[7] * (20 + 40 * (turn > 5))])
    assert engine.store.saving >= 3e3 and engine.engine.lifetime_stats.loaded_tokens
    assert len(noted) == 6, "not a step that loads and computes is left out"
    assert min(noted) > 0 and max(noted) < 1e3
    engine.offload.close()


def test_pages_in_consecutive_slots_are_one_copy() -> None:
    pages = [StoredPage(slot, b"", b"", np.zeros(1, np.int32)) for slot in (3, 4, 5, 9, 8, 0)]
    copies = [(slice(0, 3), slice(3, 6)), (slice(3, 4), slice(9, 10)), (slice(4, 5), slice(8, 9))]
    assert [*host._runs(pages)] == [*copies, (slice(5, 6), slice(0, 1))]
    assert not [*host._runs([])]


def test_a_load_is_taken_off_the_tokens_of_its_step(device: PinnedDevice) -> None:
    engine = Pinned(device, max_num_batched_tokens=40)
    loads, long = engine.offload.loads, [5] * 60
    engine.answer(TEXT)
    engine.evict_all()
    engine.store.reading.note(1, 1e-9)
    for _ in range(2):  # the first is not counted
        loads.computing.note(10**9, 1.0)
    loads._wait_for(10e-9)  # as long as 10 tokens
    assert loads.charge(40) == 30 and loads.charge(40) == 40, "once"
    loads._wait_for(1.0)
    assert loads.charge(40) == 20, "half is left"
    loads._wait_for(1.0)
    engine.engine.overlap = False  # or a second step would be scheduled, too
    request = engine.engine.add_request(long, SamplingParams(temperature=0, max_tokens=1))
    engine.engine.step()
    assert request.prefilled_tokens == 20


def test_what_leaves_host_memory_goes_to_disk_and_comes_back(device: PinnedDevice, tmp_path: Path):
    engine = Pinned(device, slots=7, folder=tmp_path / "kv")
    disk = engine.offload.tiers[1]
    assert isinstance(disk.store, DiskStore)
    for first in (1, 2, 3):
        engine.answer([first, *TEXT[1:]])
        engine.evict_all()
    disk.store.flush()
    assert len(engine.tier) == 7 and len(disk) == 14, "the first two"
    assert engine.answer(TEXT) == (greedy(TEXT, 4), len(TEXT) - 1)
    assert disk.store.counters.loaded_pages == 6
    stored = disk.store.counters.stored_pages
    engine.evict_all()
    disk.store.flush()
    assert disk.store.counters.stored_pages == stored + 7, "the third; the first has a copy there"
    half = [3, *TEXT[1:10], 9, 9]
    assert engine.answer(half) == (greedy(half, 4), 10), "in mid-page"
    engine.offload.close()
    again = Pinned(device, slots=7, folder=tmp_path / "kv")
    assert len(again.offload.tiers[1]) >= 21, "all is on disk"
    assert again.answer(half) == (greedy(half, 4), len(half) - 1)
    assert again.answer([2, *TEXT[1:]])[1] == len(TEXT) - 1
    again.engine.reset_cache()
    assert again.answer(TEXT) == (greedy(TEXT, 4), 0)
    again.offload.close()


def test_what_is_being_read_at_the_end_is_written(device: PinnedDevice, tmp_path: Path) -> None:
    engine = Pinned(device, folder=tmp_path / "kv")
    engine.answer(TEXT)
    engine.evict_all()
    engine.engine.add_request(TEXT, SamplingParams(max_tokens=1))
    engine.engine.step()
    lost = patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("device lost"))
    with lost, pytest.raises(RuntimeError, match="device lost"):
        engine.offload.close()
    assert len(Pinned(device, folder=tmp_path / "kv").offload.tiers[1]) == 7


def test_memory_that_cannot_be_pinned_is_refused(device: PinnedDevice) -> None:
    device.code = 2
    with pytest.raises(InvalidRequest, match=r"host_memory: .* cannot be pinned \(CUDA error 2\)"):
        Pinned(device)
    device.code = 0
    engine = Pinned(device)
    with pytest.raises(InvalidRequest, match="hold no page"):
        HostStore(1, engine.engine.kv_pool)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "cpu"}, "host_memory is for a GPU; on a CPU, KV memory is memory of the host"),
        (
            {"kv_dir": "kv", "kv_events_config": '{"enable_kv_cache_events": true}'},
            "kv_events_config goes with host_memory or kv_dir, not with both",
        ),
        ({"cache": "hash-block"}, "host_memory is for cache='radix', not 'hash-block'"),
        ({"host_memory": "much"}, "host_memory must be an amount like 2GB"),
    ],
)
def test_where_there_is_no_host_tier_it_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        LLM(**{"host_memory": "1MB", **settings})


def test_an_llm_tells_what_came_from_host_memory(
    device: PinnedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, run = tiny_model("llama", tmp_path), Worker._run

    def load(*_: object) -> Any:
        return load_model(path, device=CUDA, dtype="float32", attention=TorchAttention(CUDA))

    def on_the_device(worker: Worker) -> None:
        with device:
            run(worker)

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(Worker, "_run", on_the_device)
    prompt, params = [*range(1, 101)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"kv_cache_memory_bytes": "1MB", "host_memory": "1MB", "max_num_seqs": 4}
    with LLM(path, device="cuda", **settings) as llm:
        assert any("KV in host memory" in note for note in llm.notes)
        (cold,) = llm.generate([prompt], params)
        assert cold.outputs[0].token_ids == plain_greedy(path, prompt, 4, ignore_eos=True)
        llm.call(lambda: llm.cache.evict(llm.cache.pool.num_pages))
        told = llm.explain(prompt)
        assert told.misses[0].reason == "on_host" and "in host memory: 99 tokens" in str(told)
        (warm,) = llm.generate([prompt], params)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert warm.metrics.loaded_tokens == warm.num_cached_tokens == 99
        assert llm.explainer.missed_tokens["on_host"] == 0, "they were loaded"
        samples = {s.name: s.value for metric in engine_metrics(llm) for s in metric.samples}
        assert samples["radixcache_loaded_tokens_total"] == 99
        assert samples["radixcache_host_loaded_pages_total"] == 7
        assert samples["radixcache_host_stored_pages_total"] >= 7
    assert not device.registered, "given back"


def test_copies_and_graphs_over_flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In captured graphs, and in steps that are launched ahead, pages are not where they were."""
    path, rng = tiny_model("llama", tmp_path), Random(3)
    with pinning_cuda(flashinfer=True):
        monkeypatch.setattr(
            engines, "paged_model", lambda *_: load_model(path, device="cuda", dtype="float32")
        )
        engine = engines.make_engine(path, page_size=4, num_pages=40, max_num_seqs=4)
        assert isinstance(engine.cache, RadixCache)
        pool = engine.kv_pool
        offload = Offload(engine.cache, pool, HostStore(200 * pool.page_bytes, pool))
        engine.scheduler.admission.loads = offload.loads
        stems = [[rng.randrange(250) for _ in range(40)] for _ in range(8)]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for _ in range(4):
            prompts = [[*stem, rng.randrange(250)] for stem in rng.sample(stems, 3)]
            requests = engines.run(engine, prompts, params)
            for prompt, (tokens,) in zip(prompts, engines.generated(requests), strict=True):
                assert tokens == plain_greedy(path, prompt, 6, ignore_eos=True)
        assert engine.runner.graphs is not None and any(engine.runner.graphs._replays.values())
        assert engine.lifetime_stats.loaded_tokens > 100
        offload.close()


def test_a_gpu_has_room_for_what_is_loaded(device: PinnedDevice, tmp_path: Path) -> None:
    model = load_model(
        tiny_model("llama", tmp_path), device=CUDA, dtype="float32", attention=TorchAttention(CUDA)
    )
    # The context bounds the pages that are taken if nobody says how many; here memory does.
    model.max_context, free = 1 << 40, 8 << 30
    with patch.object(torch.cuda, "mem_get_info", lambda *_: (free, free)):
        with_host, without = (
            plan_memory(EngineArgs(host_memory=memory), model, True).num_pages
            for memory in ("1GB", None)
        )
    size = model.bytes_per_token * 16
    assert abs((without - with_host) * size - host.staged_bytes()) < size
