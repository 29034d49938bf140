# mypy: disable-error-code="import-not-found"
"""Does `HashBlockCache` do what vLLM does? Both get the same random requests, side by side.

    make conformance
    make conformance ARGS="--seeds 200 --operations 5000"

runs vLLM's own `KVCacheManager` (the PyPI package, in a virtual environment of its own) and
`HashBlockCache` in one process. Each operation goes to both: admissions with chunked prefill,
decoding, preemption and resumption, cache salts, LoRA adapters, images, requests that must not
read the cache, evictions, resets, pools that run full. After every operation all of this must be
equal: what was found, page tables, the order of the free queue, reference counts, hash of every
page, pages under every hash, statistics, the logged hit rate, and events.

Prints what was done, how often, and every difference; exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats
from vllm.v1.request import Request as PeerRequest
from vllm.v1.request import RequestStatus

from radixcache import CacheStats, HashBlockCache, LeaseError, OutOfPages, PagePool
from radixcache.block_hash import (
    BlockNamespace,
    HashAlgorithm,
    Image,
    first_parent,
    hash_function,
)
from radixcache.events import Cleared, Evicted, Stored
from radixcache.hash_block import BlockLease, RecentHitRate

ALGORITHMS: tuple[HashAlgorithm, ...] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEEDS = {"sha256": None, "sha256_cbor": "7", "xxhash": "0", "xxhash_cbor": "0"}
"""PYTHONHASHSEED of the random rounds; without one XXH3 starts from random bytes."""


RECENT = 40
"""Requests that the logged hit rate covers, on both sides: the real 1,000 are seldom reached."""


class Difference(Exception):
    """The two disagree."""


class Totals(NamedTuple):
    """Statistics since the last reset."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    @classmethod
    def of_peer(cls, stats: PrefixCacheStats) -> Totals:
        return cls(
            stats.requests,
            stats.queries,
            stats.hits,
            stats.preempted_queries,
            stats.preempted_hits,
        )

    @classmethod
    def of_ours(cls, stats: CacheStats) -> Totals:
        return cls(
            stats.requests,
            stats.query_tokens,
            stats.hit_tokens,
            stats.resumed_query_tokens,
            stats.resumed_hit_tokens,
        )

    def plus(self, other: Totals, sign: int = 1) -> Totals:
        return Totals(*(a + sign * b for a, b in zip(self, other, strict=True)))


@dataclass(eq=False)
class Request:
    """One request and its two halves."""

    peer: PeerRequest
    namespace: BlockNamespace | str | None
    read: bool
    target: int
    """Tokens at which it is finished."""
    lease: BlockLease | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was generated."""
        return list(self.peer.all_token_ids)


@dataclass
class Shape:
    """What one random round runs on."""

    block_size: int
    num_blocks: int
    algorithm: HashAlgorithm
    enabled: bool
    alphabet: int

    @classmethod
    def draw(cls, rng: Random, seed: int) -> Shape:
        """The algorithms take turns; one round in twelve has the cache off."""
        return cls(
            block_size=rng.choice([1, 2, 4, 4, 16, 16]),
            num_blocks=rng.choice([3, 6, 12, 24, 24, 48, 96, 96]),
            algorithm=ALGORITHMS[seed % len(ALGORITHMS)],
            enabled=seed % 12 != 11,
            alphabet=rng.choice([1, 2, 2, 5]),
        )


class Pair:
    """vLLM's manager and our cache, and one method for each operation, which compares them."""

    def __init__(self, shape: Shape, rng: Random) -> None:
        self.shape, self.rng = shape, rng
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        set_hash_seed(SEEDS[shape.algorithm])
        hash_fn = get_hash_fn_by_name(shape.algorithm)
        kv_cache_utils.init_none_hash(hash_fn)
        self.hash, self.first = hash_function(shape.algorithm), first_parent(shape.algorithm)
        self.hasher = kv_cache_utils.get_request_block_hasher(shape.block_size, hash_fn)
        self.peer = make_manager(shape)
        assert CachingMetrics().max_recent_requests == RecentHitRate.MAX_REQUESTS
        self.metrics = CachingMetrics(max_recent_requests=RECENT)
        self.cache = HashBlockCache(
            PagePool(shape.num_blocks, shape.block_size),
            hash_algorithm=shape.algorithm,
            enabled=shape.enabled,
        )
        self.cache.recent.MAX_REQUESTS = RECENT
        self.heard: list[Stored | Evicted | Cleared] = []
        self.cache.events.append(self.heard.append)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.looking: list[BlockLease] = []
        self.past: list[list[int]] = [[]]
        self.ended = Totals()
        """Statistics of the steps that have ended, as vLLM counted them."""
        self.serial = 0
        some_do_not_fit = shape.block_size * shape.num_blocks
        most_fit = some_do_not_fit // 3
        self.longest = min(
            rng.choice([some_do_not_fit, most_fit, most_fit, most_fit]), 12 * shape.block_size + 20
        )
        self.choices: dict[Callable[[], None], int] = {
            self.arrive: 16,
            self.admit: 20,
            self.go_on: 50,
            self.abort: 2,
            self.preempt: 3,
            self.look: 6,
            self.hold: 3,
            self.let_go: 4,
            self.evict: 2,
            self.reset: 2,
            self.drain: 1,
            self.end_step: 6,
        }

    def run(self, operations: int) -> None:
        """That many operations that made sense, each compared."""
        while self.counts["operations"] < operations:
            before = len(self.trace)
            self.rng.choices(list(self.choices), list(self.choices.values()))[0]()
            if len(self.trace) > before:
                self.counts["operations"] += 1
                self.counts[self.trace[-1].split()[0]] += 1
                self.compare()

    # ------------------------------------------------------------------ operations

    def arrive(self) -> None:
        """A request: part of an earlier one and something new, some salt, adapter or image."""
        if len(self.waiting) > 5:
            return
        rng = self.rng
        known = rng.choice(self.past[-40:])
        prompt = known[: rng.choice([len(known), len(known), rng.randint(0, len(known))])]
        prompt = prompt + self.some_tokens(rng.choice([0, 1, 2, self.shape.block_size + 1, 30]))
        prompt = prompt[: max(1, self.longest - 1)] or self.some_tokens(1)
        salt = rng.choice([None] * 8 + ["", "s", "s", "tenant"])
        lora = rng.choice([None] * 12 + [("a", "/p"), ("a", "/q"), ("b", "/p")])
        images = self.some_images(len(prompt)) if rng.random() < 0.1 else ()
        read = rng.random() > 0.08
        self.serial += 1
        peer = PeerRequest(
            request_id=str(self.serial),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=64, skip_reading_prefix_cache=not read),
            pooling_params=None,
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
            block_hasher=self.hasher,
        )
        namespace: BlockNamespace | str | None = salt
        if lora or images:
            namespace = BlockNamespace(salt=salt, lora=lora, images=images)
        target = min(len(prompt) + rng.choice([1, 2, 8, 2 * self.shape.block_size]), self.longest)
        request = Request(peer, namespace, read, target)
        self.waiting.append(request)
        self.past.append(prompt)
        self.trace.append(f"arrive {self.serial} {prompt} {namespace} read={read}")

    def admit(self) -> None:
        """What the scheduler does with a waiting request: look up, allocate a chunk or refuse."""
        if not self.waiting or len(self.running) > 7:
            return
        request = self.rng.choice(self.waiting)
        self.make_way(request.peer.num_tokens)
        peer, tokens = request.peer, request.tokens
        computed, hit, _ = self.peer.get_computed_blocks(peer)
        found = [block.block_id for block in computed.blocks[0]]
        if request.read:
            self.same("match", hit, self.cache.match(tokens, request.namespace))
        lease = self.cache.acquire(
            tokens, request.namespace, resumed=peer.num_preemptions > 0, read=request.read
        )
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
        peer.status = RequestStatus.RUNNING
        self.waiting.remove(request)
        self.running.append(request)

    def go_on(self) -> None:
        """A prefill chunk, or one decoded token; where no page is free, somebody is preempted."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        peer = request.peer
        left = peer.num_tokens - peer.num_computed_tokens
        if not left and peer.num_tokens >= request.target:
            self.trace.append(f"free {peer.request_id}")
            self.leave(request)
            self.past.append(request.tokens)
            return
        if not left:
            peer.append_output_token_ids(self.rng.randrange(self.shape.alphabet))
            left = 1
        count = self.chunk(left)
        self.make_way(count)
        self.trace.append(f"{'decode' if left == 1 else 'prefill'} {peer.request_id} + {count}")
        assert request.lease is not None
        if request.lease.publishing:  # one chunk a step
            self.commit()
        if not self.allocate(request, request.lease, count):
            self.counts["refused"] += 1
            self.give_up(self.rng.choice(self.running))

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
        blocks = self.peer.allocate_slots(peer, count, hit, computed)
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
        peer.num_computed_tokens += hit + count
        self.same("computed", peer.num_computed_tokens, lease.num_tokens)
        self.counts["pages evicted"] += self.cache.stats.evicted_pages - evicted
        return True

    def abort(self) -> None:
        """A running request ends before its time."""
        if self.running:
            request = self.rng.choice(self.running)
            self.trace.append(f"abort {request.peer.request_id}")
            self.leave(request)
            self.past.append(request.tokens)

    def preempt(self) -> None:
        """A running request goes back to the queue."""
        if self.running:
            request = self.rng.choice(self.running)
            self.trace.append(f"preempt {request.peer.request_id}")
            self.give_up(request)

    def look(self) -> None:
        """A look-up that nothing comes of."""
        prompt = self.rng.choice(self.past[-40:]) + self.some_tokens(self.rng.randint(1, 3))
        peer = PeerRequest("look", prompt, SamplingParams(), None, block_hasher=self.hasher)
        self.trace.append(f"look {prompt}")
        self.same("match", self.peer.get_computed_blocks(peer)[1], self.cache.match(prompt))

    def hold(self) -> None:
        """On our side only: a lease that looks, and is not used for a while."""
        if len(self.looking) < 3:
            prompt = self.rng.choice(self.past[-40:]) + self.some_tokens(1)
            self.looking.append(self.cache.acquire(prompt))
            self.trace.append(f"hold {prompt}")

    def make_way(self, num_tokens: int) -> None:
        """End such leases before they keep a page from an allocation: vLLM knows none."""
        reach = 2 * (num_tokens // self.shape.block_size + 2)
        held = self.cache.pool.refs
        if len(self.cache.queue) < reach + 12 or any(held[p] for p in self.cache.queue[:reach]):
            self.release_looking()

    def let_go(self) -> None:
        """Such a lease is released."""
        if self.looking:
            self.trace.append("let-go")
            self.cache.release(self.looking.pop(self.rng.randrange(len(self.looking))))

    def evict(self) -> None:
        """Pages forget what they hold, where they stand in the queue."""
        self.release_looking()
        queue = self.peer.block_pool.free_block_queue.get_all_free_blocks()
        pages = [block for block in queue if block.block_hash is not None]
        pages = pages[: self.rng.choice([1, 1, 2, 5])]
        self.trace.append(f"evict {len(pages)}")
        self.peer.evict_blocks({block.block_id for block in pages})
        self.same("evicted", len(pages), self.cache.evict(len(pages)))
        self.compare_events(ordered=False)  # vLLM takes a set

    def reset(self) -> None:
        """Everything is forgotten, unless a page is in use."""
        self.release_looking()
        self.trace.append("reset")
        try:
            self.cache.reset()
        except LeaseError:
            self.counts["resets refused"] += 1
            self.same("reset", self.peer.reset_prefix_cache(), False)
        else:
            self.same("reset", self.peer.reset_prefix_cache(), True)
            self.ended = Totals().plus(self.peer_step(), -1)

    def drain(self) -> None:
        """All requests end; half the time the cache is reset after that."""
        self.trace.append("drain")
        while self.running:
            self.leave(self.running[0])
        if self.rng.random() < 0.5:
            self.reset()

    def end_step(self) -> None:
        """The step was executed."""
        self.trace.append("step")
        self.commit()

    def commit(self) -> None:
        """The step is over, and its statistics are taken."""
        self.cache.commit()
        self.ended = self.ended.plus(self.peer_step())
        self.metrics.observe(self.peer.make_prefix_cache_stats())
        self.same("logged hit rate", self.metrics.hit_rate, self.cache.recent.value)

    # ------------------------------------------------------------------ helpers

    def chunk(self, left: int) -> int:
        """How much of what is left one step computes."""
        return left if self.rng.random() < 0.5 else self.rng.randint(1, left)

    def some_tokens(self, most: int) -> list[int]:
        """Few different ones, so that requests meet again."""
        count = self.rng.randint(min(1, most), most)
        return [self.rng.randrange(self.shape.alphabet) for _ in range(count)]

    def some_images(self, length: int) -> tuple[Image, ...]:
        """Inputs one after the other, with or without a gap."""
        images: list[Image] = []
        at = self.rng.randint(0, 3)
        while at < length and len(images) < 4:
            size = self.rng.randint(1, 2 * self.shape.block_size)
            images.append(Image(self.rng.choice(["cat", "dog"]), at, size))
            at += size + self.rng.choice([0, 0, 1, self.shape.block_size])
        return tuple(images)

    def leave(self, request: Request) -> None:
        """The request's pages are let go on both sides."""
        assert request.lease is not None
        if request.lease.publishing:
            self.commit()
        self.cache.release(request.lease)
        self.peer.free(request.peer)
        request.lease = None
        self.running.remove(request)

    def give_up(self, request: Request) -> None:
        """Preempt as vLLM's scheduler does."""
        self.leave(request)
        request.peer.num_computed_tokens = 0
        request.peer.num_preemptions += 1
        request.peer.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, request)
        self.counts["preempted"] += 1

    def release_looking(self) -> None:
        """End the leases that only look."""
        while self.looking:
            self.cache.release(self.looking.pop())

    # ------------------------------------------------------------------ comparison

    def same(self, what: str, peer: object, ours: object) -> None:
        """Raise if the two differ."""
        if peer != ours:
            raise Difference(f"{what}: vLLM {peer}, radixcache {ours}")

    def peer_step(self) -> Totals:
        """What vLLM has counted since the last step ended."""
        return Totals.of_peer(self.peer.prefix_cache_stats)

    def compare(self) -> None:
        """Everything that can be seen, on both sides."""
        self.compare_pages()
        self.compare_events(ordered=True)
        for request in self.running:
            assert request.lease is not None
            peer_table = self.peer.get_block_ids(request.peer.request_id)[0]
            self.same("page table", peer_table, request.lease.page_table.tolist())
        peer, ours = self.ended.plus(self.peer_step()), Totals.of_ours(self.cache.stats)
        self.same("statistics", peer, ours)
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
        self.counts["most duplicates"] = max(
            self.counts["most duplicates"], *map(len, ours.values()), 0
        )

    def compare_events(self, ordered: bool) -> None:
        """What the listeners were told; ours name tokens, vLLM's name hashes."""
        peer = [as_plain(event) for event in self.peer.take_events()]
        ours = [self.as_peer_event(event) for event in self.heard]
        self.heard.clear()
        self.counts["events"] += len(ours)
        if not ordered:
            peer.sort()
            ours.sort()
        self.same("events", peer, ours)

    def as_peer_event(self, event: Stored | Evicted | Cleared) -> tuple[Any, ...]:
        """An event of ours in the words of vLLM."""
        if isinstance(event, Cleared):
            return ("cleared",)
        size = self.shape.block_size
        tokens = event.tokens.tolist()
        hashes = self.chain(tokens, event.namespace)
        first = event.start // size
        if isinstance(event, Evicted):
            assert event.start == len(tokens) - size
            return ("removed", hashes[-1])
        return (
            "stored",
            hashes[first:],
            hashes[first - 1] if first else None,
            tokens[event.start :],
        )

    def chain(self, tokens: list[int], namespace: Any) -> list[bytes]:
        """Hashes of the whole blocks of `tokens`."""
        size = self.shape.block_size
        if namespace is None or isinstance(namespace, str):
            namespace = BlockNamespace(salt=namespace)
        hashes: list[bytes] = []
        parent = self.first
        for at in range(0, len(tokens), size):
            content = (parent, tuple(tokens[at : at + size]), namespace.keys(at, at + size))
            parent = self.hash(content)
            hashes.append(parent)
        return hashes


def as_plain(event: object) -> tuple[Any, ...]:
    """An event of vLLM as a tuple."""
    if isinstance(event, BlockStored):
        return ("stored", event.block_hashes, event.parent_block_hash, list(event.token_ids))
    if isinstance(event, BlockRemoved):
        (block_hash,) = event.block_hashes
        return ("removed", block_hash)
    assert isinstance(event, AllBlocksCleared)
    return ("cleared",)


def set_hash_seed(seed: str | None) -> None:
    """Set or unset PYTHONHASHSEED, which both sides read when they start."""
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed


def make_manager(shape: Shape) -> KVCacheManager:
    """vLLM's manager of one full-attention group."""
    spec = FullAttentionSpec(
        block_size=shape.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheManager(
        KVCacheConfig(shape.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=1 << 20,
        scheduler_block_size=shape.block_size,
        hash_block_size=shape.block_size,
        enable_caching=shape.enabled,
        log_stats=True,
        enable_kv_cache_events=True,
    )


def compare_hashes() -> list[str]:
    """Hashes of fixed content by vLLM, by us and as written down; the differences, in words."""
    differences = []
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="cat", mm_position=PlaceholderRange(20, 30)
    )
    embeds = torch.arange(96, dtype=torch.float32).reshape(48, 2)
    digests = tuple(
        sha256(embeds[at : at + 16].numpy().tobytes()).digest() for at in range(0, 48, 16)
    )
    cases: dict[str, tuple[dict[str, Any], BlockNamespace]] = {
        "plain": ({}, BlockNamespace()),
        "salt": ({"cache_salt": "s"}, BlockNamespace(salt="s")),
        "lora": (
            {"lora_request": LoRARequest("a", 1, "/p")},
            BlockNamespace(lora=("a", "/p")),
        ),
        "image": ({"mm_features": [image]}, BlockNamespace(images=(Image("cat", 20, 30),))),
        "embeds": (
            {"prompt_embeds": embeds, "prompt_is_token_ids": [True] * 48},  # a mixed prompt
            BlockNamespace(prompt_embeds=digests),
        ),
    }
    tokens, generated = list(range(48)), list(range(48, 70))
    whole = tokens + generated
    for algorithm in ALGORITHMS:
        for seed in (None, "0", "42"):
            if seed is None and algorithm.startswith("xxhash"):
                continue  # random
            set_hash_seed(seed)
            peer_hash = get_hash_fn_by_name(algorithm)
            kv_cache_utils.init_none_hash(peer_hash)
            hasher = kv_cache_utils.get_request_block_hasher(16, peer_hash)
            for name, (options, namespace) in cases.items():
                request = PeerRequest(
                    "r", tokens, SamplingParams(), None, block_hasher=hasher, **options
                )
                request.append_output_token_ids(generated)
                peer = [kv_cache_utils.NONE_HASH, *request.block_hashes]
                ours = [parent := first_parent(algorithm)]
                for at in range(0, 64, 16):
                    keys = namespace.keys(at, at + 16)
                    parent = hash_function(algorithm)((parent, tuple(whole[at : at + 16]), keys))
                    ours.append(parent)
                if peer != ours:
                    differences.append(f"hashes of {algorithm}, seed {seed}, {name}: {peer} {ours}")
    return differences


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="HashBlockCache against vLLM's KVCacheManager.")
    parser.add_argument("--seeds", type=int, default=64, help="rounds (64)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=5000, help="per seed (5000)")
    arguments = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # by default, 64 bits of each
    differences = compare_hashes()
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    last = arguments.first_seed + arguments.seeds
    for seed in range(arguments.first_seed, last):
        rng = Random(seed)
        pair = Pair(Shape.draw(rng, seed), rng)
        try:
            pair.run(arguments.operations)
        except Exception as error:  # one that breaks is one that differs
            differences.append(f"seed {seed}, {pair.shape}: {error!r}\n  after " + pair.trace[-1])
        most = max(counts["most duplicates"], pair.counts["most duplicates"])
        counts += pair.counts
        counts["most duplicates"] = most
        if sys.stderr.isatty():
            print(
                f"\rseed {seed + 1 - arguments.first_seed}/{arguments.seeds}",
                end="",
                file=sys.stderr,
            )
    for what, count in sorted(counts.items()):
        print(f"{count:>9,}  {what}")
    for difference in differences:
        print(f"DIFFERENCE: {difference}")
    print(
        f"vLLM {version('vllm')}: {len(differences)} differences in {counts['operations']:,} "
        f"operations over seeds {arguments.first_seed}..{last - 1}, and in the hashes of "
        f"{', '.join(ALGORITHMS)} ({time.perf_counter() - started:.0f} s)"
    )
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
