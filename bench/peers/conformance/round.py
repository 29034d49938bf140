# mypy: disable-error-code="import-not-found"
"""Random requests, each operation of which goes to vLLM's manager and to `HashBlockCache`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request as PeerRequest
from vllm.v1.request import RequestStatus

from bench.peers.vllm_manager import Driver
from radixcache import CacheStats, HashBlockCache, LeaseError, OutOfPages, PagePool
from radixcache.events import Cleared, Evicted, Stored
from radixcache.hash_block.cache import BlockLease
from radixcache.hash_block.hashes import (
    BlockNamespace,
    Image,
    as_block_namespace,
    first_parent,
    hash_block,
)


class Difference(Exception):
    """The two disagree."""


def counted(stats: PrefixCacheStats | CacheStats) -> NDArray[np.int64]:
    """[5] requests, queried and hit tokens; the latter two again, of resumed requests."""
    if isinstance(stats, CacheStats):
        tokens = (stats.query_tokens, stats.hit_tokens)
        resumed = (stats.resumed_query_tokens, stats.resumed_hit_tokens)
    else:
        tokens = (stats.queries, stats.hits)
        resumed = (stats.preempted_queries, stats.preempted_hits)
    return np.array((stats.requests, *tokens, *resumed))


def chain(tokens: list[int], size: int, namespace: BlockNamespace | None) -> list[bytes]:
    """Our hashes of the whole blocks of `tokens`."""
    hashes: list[bytes] = []
    parent = first_parent()
    for at in range(0, len(tokens) - size + 1, size):
        keys = namespace.keys(at, at + size) if namespace else None
        parent = hash_block((parent, tuple(tokens[at : at + size]), keys))
        hashes.append(parent)
    return hashes


@dataclass(eq=False)
class Request:
    """One request and its two halves; `target` is how many tokens it has when it is finished."""

    peer: PeerRequest
    namespace: BlockNamespace | str | None
    target: int
    lease: BlockLease | None = None

    @property
    def tokens(self) -> list[int]:
        return list(self.peer.all_token_ids)


class Round:
    """Requests that come, go on, are put back and end; one method for each operation."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 4, 4, 16, 16])
        num_blocks = rng.choice([3, 6, 12, 24, 24, 48, 96, 96])
        self.alphabet = rng.choice([1, 2, 2, 5])
        self.shape = f"{num_blocks} blocks of {self.size}, {self.alphabet} different tokens"
        some_do_not_fit = self.size * num_blocks
        most_fit = some_do_not_fit // 3
        longest = rng.choice([some_do_not_fit, most_fit, most_fit, most_fit])
        self.longest = min(longest, 12 * self.size + 20)
        on = {"enable_caching": True, "log_stats": True, "enable_kv_cache_events": True}
        self.driver = Driver(num_blocks, self.size, **on)
        self.peer = self.driver.manager
        self.cache = HashBlockCache(PagePool(num_blocks, self.size))
        self.our_events: list[Stored | Evicted | Cleared] = []
        self.cache.events.append(self.our_events.append)
        self.ended = np.zeros(5, np.int64)
        """Statistics of the steps that have ended, as vLLM counted them."""
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prompts: list[list[int]] = [[]]
        self.serial = 0
        self.choices: dict[Callable[[], None], int] = {
            self.arrive: 16, self.admit: 20, self.go_on: 50, self.abort: 2, self.preempt: 3,
            self.look: 6, self.evict: 2, self.reset: 2, self.drain: 1, self.end_step: 6,
        }  # fmt: skip

    def run(self, operations: int) -> None:
        """That many operations that made sense, each compared."""
        while self.counts["operations"] < operations:
            before = len(self.trace)
            self.rng.choices(list(self.choices), list(self.choices.values()))[0]()
            if len(self.trace) > before:
                self.counts["operations"] += 1
                self.counts[self.trace[-1].split()[0]] += 1
                self.compare()

    # -- operations ----------------------------------------------------------------------------

    def arrive(self) -> None:
        """A request: part of an earlier one and something new, some salt, adapter or image."""
        if len(self.waiting) > 5:
            return
        rng = self.rng
        known = rng.choice(self.prompts[-40:])
        prompt = known[: rng.choice([len(known), len(known), rng.randint(0, len(known))])]
        prompt = prompt + self.some_tokens(rng.choice([0, 1, 2, self.size + 1, 30]))
        prompt = prompt[: max(1, self.longest - 1)] or self.some_tokens(1)
        salt = rng.choice([None] * 8 + ["", "s", "s", "tenant"])
        lora = rng.choice([None] * 12 + [("a", "/p"), ("a", "/q"), ("b", "/p")])
        images = self.some_images(len(prompt)) if rng.random() < 0.1 else ()
        self.serial += 1
        peer = self.driver.request(
            str(self.serial),
            prompt,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=image.identifier,
                    mm_position=PlaceholderRange(offset=image.offset, length=image.length),
                )
                for image in images
            ],
            lora_request=lora and LoRARequest(lora[0], 1 + "ab".index(lora[0]), lora[1]),
            cache_salt=salt,
        )
        namespace: BlockNamespace | str | None = salt
        if lora or images:
            namespace = BlockNamespace(salt=salt, lora=lora, images=images)
        target = min(len(prompt) + rng.choice([1, 2, 8, 2 * self.size]), self.longest)
        self.waiting.append(Request(peer, namespace, target))
        self.prompts.append(prompt)
        self.trace.append(f"arrive {self.serial} {prompt} {namespace}")

    def admit(self) -> None:
        """Admit a waiting request as the scheduler does: look up, allocate a chunk or refuse."""
        if not self.waiting or len(self.running) > 7:
            return
        request = self.rng.choice(self.waiting)
        peer, tokens = request.peer, request.tokens
        computed, hit = self.driver.find(peer)
        found = [block.block_id for block in computed.blocks[0]]
        self.same("match", hit, self.cache.match(tokens, request.namespace))
        resumed = peer.num_preemptions > 0
        lease: Any = self.cache.acquire(tokens, request.namespace, resumed=resumed)
        self.same("hit", hit, lease.cached_tokens)
        self.same("hit pages", found, lease.page_table.tolist())
        self.compare_pages()  # acquire holds, and moves nothing
        count = self.chunk(len(tokens) - hit)
        self.trace.append(f"admit {peer.request_id} {hit} cached + {count}")
        if not self.allocate(request, lease, count, hit, computed):
            self.counts["refused"] += 1
            self.cache.release(lease)
            if self.rng.random() < 0.3:  # aborted while it waits
                self.waiting.remove(request)
            return
        self.peer.record_prefix_cache_stats(peer, hit)
        self.counts["hits"] += hit > 0
        self.counts["hits in the same step"] += any(page in self.cache._published for page in found)
        self.counts["resumed"] += peer.num_preemptions > 0
        request.lease = lease
        self.waiting.remove(request)
        self.running.append(request)

    def go_on(self) -> None:
        """Run a prefill chunk, or decode one token; if no page is free, preempt a request."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        peer = request.peer
        left = peer.num_tokens - peer.num_computed_tokens
        if not left and peer.num_tokens >= request.target:
            self.trace.append(f"free {peer.request_id}")
            self.leave(request)
            self.prompts.append(request.tokens)
            return
        if not left:
            peer.append_output_token_ids(self.rng.randrange(self.alphabet))
            left = 1
        count = self.chunk(left)
        self.trace.append(f"{'decode' if left == 1 else 'prefill'} {peer.request_id} + {count}")
        assert request.lease is not None
        if request.lease.publishing:  # one chunk a step
            self.commit()
        if not self.allocate(request, request.lease, count):
            self.counts["refused"] += 1
            self.put_back(self.rng.choice(self.running))

    def abort(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            self.trace.append(f"abort {request.peer.request_id}")
            self.leave(request)
            self.prompts.append(request.tokens)

    def preempt(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            self.trace.append(f"preempt {request.peer.request_id}")
            self.put_back(request)

    def look(self) -> None:
        """A look-up that nothing comes of."""
        prompt = self.rng.choice(self.prompts[-40:]) + self.some_tokens(self.rng.randint(1, 3))
        peer = self.driver.request("look", prompt)
        self.trace.append(f"look {prompt}")
        self.same("match", self.driver.find(peer)[1], self.cache.match(prompt))

    def evict(self) -> None:
        """Pages forget what they hold, where they stand in the queue."""
        queue = self.peer.block_pool.free_block_queue.get_all_free_blocks()
        pages = [block for block in queue if block.block_hash is not None]
        pages = pages[: self.rng.choice([1, 1, 2, 5])]
        self.trace.append(f"evict {len(pages)}")
        self.peer.evict_blocks({block.block_id for block in pages})
        self.same("evicted", len(pages), self.cache.evict(len(pages)))
        self.compare_events(ordered=False)  # vLLM takes a set

    def reset(self) -> None:
        """Everything is forgotten, unless a page is in use."""
        self.trace.append("reset")
        try:
            self.cache.reset()
        except LeaseError:
            self.counts["resets refused"] += 1
            self.same("reset", self.peer.reset_prefix_cache(), False)
        else:
            self.same("reset", self.peer.reset_prefix_cache(), True)
            self.ended = -counted(self.peer.prefix_cache_stats)

    def drain(self) -> None:
        """All requests end; half the time the cache is reset after that."""
        self.trace.append("drain")
        while self.running:
            self.leave(self.running[0])
        if self.rng.random() < 0.5:
            self.reset()

    def end_step(self) -> None:
        self.trace.append("step")
        self.commit()

    # -- what they consist of ------------------------------------------------------------------

    def chunk(self, left: int) -> int:
        return left if self.rng.random() < 0.5 else self.rng.randint(1, left)

    def some_tokens(self, most: int) -> list[int]:
        """Few different ones, so that requests meet again."""
        count = self.rng.randint(min(1, most), most)
        return [self.rng.randrange(self.alphabet) for _ in range(count)]

    def some_images(self, length: int) -> tuple[Image, ...]:
        """Inputs one after the other, with or without a gap."""
        images: list[Image] = []
        at = self.rng.randint(0, 3)
        while at < length and len(images) < 4:
            size = self.rng.randint(1, 2 * self.size)
            images.append(Image(self.rng.choice(["cat", "dog"]), at, size))
            at += size + self.rng.choice([0, 0, 1, self.size])
        return tuple(images)

    def allocate(
        self,
        request: Request,
        lease: BlockLease,
        count: int,
        hit: int = 0,
        computed: KVCacheBlocks | None = None,
    ) -> bool:
        """`count` more tokens on both sides; whether there was room."""
        peer = request.peer
        evicted = self.cache.stats.evicted_pages
        blocks = self.driver.allocate(peer, count, hit, computed)
        have = lease._num_pages
        try:
            self.cache.reserve(lease, lease.num_tokens + count)
        except OutOfPages:
            self.same("room", blocks is not None, False)
            return False
        self.same("room", blocks is not None, True)
        assert blocks is not None
        new = [block.block_id for block in blocks.blocks[0]]
        self.same("new pages", new, lease.page_table[have:].tolist())
        start = lease.num_tokens
        self.cache.publish(lease, np.array(request.tokens[start : start + count], np.int32))
        self.same("computed", peer.num_computed_tokens, lease.num_tokens)
        self.counts["pages evicted"] += self.cache.stats.evicted_pages - evicted
        return True

    def leave(self, request: Request) -> None:
        """The request's pages are let go on both sides."""
        assert request.lease is not None
        if request.lease.publishing:
            self.commit()
        self.cache.release(request.lease)
        self.driver.free(request.peer)
        request.lease = None
        self.running.remove(request)

    def put_back(self, request: Request) -> None:
        """Preempt as vLLM's scheduler does."""
        self.leave(request)
        request.peer.num_preemptions += 1
        request.peer.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, request)
        self.counts["preempted"] += 1

    def commit(self) -> None:
        """The step is over, and its statistics are taken."""
        self.cache.commit()
        self.ended = self.ended + counted(self.peer.prefix_cache_stats)
        self.peer.make_prefix_cache_stats()  # which begins anew

    # -- everything in which the two may differ ------------------------------------------------

    def same(self, what: str, peer: object, ours: object) -> None:
        if peer != ours:
            raise Difference(f"{what}: vLLM {peer}, radixcache {ours}")

    def compare(self) -> None:
        self.compare_pages()
        self.compare_events(ordered=True)
        for request in self.running:
            assert request.lease is not None
            peer_table = self.peer.get_block_ids(request.peer.request_id)[0]
            self.same("page table", peer_table, request.lease.page_table.tolist())
        peer = self.ended + counted(self.peer.prefix_cache_stats)
        self.same("statistics", peer.tolist(), counted(self.cache.stats).tolist())
        if self.counts["operations"] % 10 == 0:
            self.cache.check()

    def compare_pages(self) -> None:
        """The free queue, reference counts, hashes of pages, pages of hashes."""
        pool, cache = self.peer.block_pool, self.cache
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        self.same("free queue", queue, cache.queue)
        refs = (cache.pool.refs - cache._looking).tolist()
        self.same("reference counts", [b.ref_cnt for b in pool.blocks[1:]], refs[1:])
        hashes = [None if block is None else block.hash for block in cache._blocks]
        peer_hashes = [b.block_hash and b.block_hash[:-4] for b in pool.blocks]
        self.same("hashes", peer_hashes, hashes)
        peer_map = {
            key[:-4]: list(held) if isinstance(held, dict) else [held.block_id]
            for key, held in pool.cached_block_hash_to_block._cache.items()
        }
        ours: dict[bytes, list[int]] = {}
        for block_hash, page in cache._map.items():
            ours.setdefault(block_hash, []).append(page)
        self.same("pages of a hash", peer_map, ours)

    def compare_events(self, ordered: bool) -> None:
        """Compare the events that listeners got; ours name tokens, vLLM's name hashes."""
        peer = [as_plain(event) for event in self.peer.take_events()]
        ours = [self.as_peer_event(event) for event in self.our_events]
        self.our_events.clear()
        self.counts["events"] += len(ours)
        if not ordered:
            peer.sort()
            ours.sort()
        self.same("events", peer, ours)

    def as_peer_event(self, event: Stored | Evicted | Cleared) -> tuple[Any, ...]:
        """An event of ours in the words of vLLM."""
        if isinstance(event, Cleared):
            return ("cleared",)
        tokens = event.tokens.tolist()
        hashes = chain(tokens, self.size, as_block_namespace(event.namespace))
        first = event.start // self.size
        if isinstance(event, Evicted):
            assert event.start == len(tokens) - self.size
            return ("removed", hashes[-1])
        parent = hashes[first - 1] if first else None
        return ("stored", hashes[first:], parent, tokens[event.start :])


def as_plain(event: object) -> tuple[Any, ...]:
    """An event of vLLM as a tuple."""
    if isinstance(event, BlockStored):
        return ("stored", event.block_hashes, event.parent_block_hash, list(event.token_ids))
    if isinstance(event, BlockRemoved):
        (block_hash,) = event.block_hashes
        return ("removed", block_hash)
    return ("cleared",)
