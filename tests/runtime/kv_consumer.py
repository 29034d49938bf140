"""A router's side of KV events, written after the wire format and not after our code.

Blocks are known by what the events say of their content: hashes are names only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import zmq

from radixcache import PrefixCache
from radixcache.runtime.kv_events.config import KVEventsConfig
from radixcache.runtime.kv_events.publisher import KVEventPublisher

NAMES = itertools.count()


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: Literal["GPU", "CPU", "DISK"]
    lora_name: str | None
    extra_keys: list[list[Any] | None]
    group_idx: Literal[0]
    kv_cache_spec_kind: Literal["full_attention"]


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: Literal["GPU", "CPU", "DISK"]
    group_idx: Literal[0]


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[WireEvent]
    data_parallel_rank: int


Block = tuple[str | None, tuple[int, ...]]
"""A salt, and all tokens up to the end of the block."""


class Consumer:
    """Which blocks an engine holds, by its events alone; asserts what routers rely on.

    Args:
        in_order: no block is removed before those that follow it.
    """

    def __init__(self, block_size: int, in_order: bool = True) -> None:
        self.block_size, self.in_order = block_size, in_order
        self.next = 0
        self.events: list[WireEvent] = []
        self.held: dict[int, Block] = {}
        self.below: dict[int, Block] = {}
        """In the tier below the GPU's."""
        self.known: dict[int, Block] = {}
        """All that were ever held."""

    def hear(self, topic: bytes, number: bytes, payload: bytes) -> None:
        """One message; the numbers leave no gap."""
        assert len(number) == 8 and int.from_bytes(number, "big") == self.next
        self.next += 1
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert abs(batch.ts - time.time()) < 600 and batch.data_parallel_rank == 0
        assert batch.events
        for event in batch.events:
            self.events.append(event)
            self._take(event)

    def _take(self, event: WireEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            self.below.clear()
        elif isinstance(event, BlockRemoved) and event.medium != "GPU":
            del self.below[event.block_hashes[0]]
        elif isinstance(event, BlockRemoved):
            (name,) = event.block_hashes
            salt, tokens = self.held.pop(name)
            if self.in_order:
                longer = (held for held in self.held.values() if len(held[1]) > len(tokens))
                assert not any(s == salt and t[: len(tokens)] == tokens for s, t in longer)
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        size = self.block_size
        assert event.block_size == size
        assert len(event.token_ids) == len(event.block_hashes) * size > 0
        assert len({*event.block_hashes}) == len(event.block_hashes) == len(event.extra_keys)
        first, *others = event.extra_keys
        assert not any(others)
        salt: str | None
        tokens: tuple[int, ...]
        if event.parent_block_hash is None:
            salt, tokens = (first[0] if first else None), ()
        else:
            assert not first
            before = self.held if event.medium == "GPU" else self.known
            salt, tokens = before[event.parent_block_hash]
        for at, name in enumerate(event.block_hashes):
            tokens += tuple(event.token_ids[at * size : (at + 1) * size])
            assert 0 <= name < 1 << 64 and self.known.get(name, (salt, tokens)) == (salt, tokens)
            held = self.held if event.medium == "GPU" else self.below
            held[name] = self.known[name] = (salt, tokens)

    def probe(self, tokens: Sequence[int], namespace: Hashable) -> int:
        """How many blocks of a prompt the engine would find."""
        held, count = {*self.held.values()}, 0
        while len(tokens) >= (count + 1) * self.block_size:
            if (namespace, tuple(tokens[: (count + 1) * self.block_size])) not in held:
                break
            count += 1
        return count


def opened(kind: int) -> zmq.Socket[bytes]:
    """A socket that waits for nothing when it is closed."""
    found: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    found.setsockopt(zmq.LINGER, 0)
    return found


def ask(endpoint: str, *frames: bytes) -> list[list[bytes]]:
    """What is answered to a request for a replay, without its end."""
    answers: list[list[bytes]] = []
    with opened(zmq.DEALER) as client:
        client.set_hwm(0)
        client.connect(endpoint)
        client.send_multipart(frames)
        while True:
            assert client.poll(10_000), "no answer"
            empty, *message = client.recv_multipart()
            assert empty == b""
            if message == [b"", b"\xff" * 8, b""]:
                return answers
            answers.append(message)


def catch_up(consumer: Consumer, publisher: KVEventPublisher) -> None:
    """Hear what the consumer has not yet heard, once all is sent."""
    end = time.monotonic() + 10
    while publisher._queue:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert publisher.replay_endpoint is not None
    for message in ask(publisher.replay_endpoint, b"", consumer.next.to_bytes(8, "big")):
        consumer.hear(*message)


@contextmanager
def publishing(cache: PrefixCache, **config: Any) -> Iterator[KVEventPublisher]:
    name = next(NAMES)
    given = {"endpoint": f"inproc://e{name}", "replay_endpoint": f"inproc://r{name}", **config}
    publisher = KVEventPublisher(cache, KVEventsConfig(True, **given))
    try:
        yield publisher
    finally:
        publisher.close()
        assert not publisher._thread.is_alive()


def store(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> None:
    """A step that computes `tokens`, all of one request."""
    lease = cache.acquire(tokens, salt)
    cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens[lease.num_tokens :])
    cache.commit()
    cache.release(lease)


def heard(publisher: KVEventPublisher, block_size: int = 4) -> Consumer:
    publisher.end_step()
    consumer = Consumer(block_size)
    catch_up(consumer, publisher)
    return consumer
