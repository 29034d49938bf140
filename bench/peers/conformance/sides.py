# mypy: disable-error-code="import-not-found"
"""vLLM's manager and `HashBlockCache` side by side, and everything in which they may differ."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.stats import PrefixCacheStats

from bench.peers.vllm_manager import make_manager
from radixcache import CacheStats, HashBlockCache, PagePool
from radixcache.block_hash import BlockNamespace, as_block_namespace, first_parent, hash_block
from radixcache.events import Cleared, Evicted, Stored


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


@dataclass
class Shape:
    block_size: int
    num_blocks: int
    alphabet: int

    @classmethod
    def draw(cls, rng: Random) -> Shape:
        return cls(
            block_size=rng.choice([1, 2, 4, 4, 16, 16]),
            num_blocks=rng.choice([3, 6, 12, 24, 24, 48, 96, 96]),
            alphabet=rng.choice([1, 2, 2, 5]),
        )


def make_hasher(block_size: int, seed: str | None = None) -> Any:
    """What hashes vLLM's requests; both sides read PYTHONHASHSEED when they start."""
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    return kv_cache_utils.get_request_block_hasher(block_size, hash_fn)


def chain(tokens: list[int], size: int, namespace: BlockNamespace | None) -> list[bytes]:
    hashes: list[bytes] = []
    parent = first_parent()
    for at in range(0, len(tokens) - size + 1, size):
        keys = namespace.keys(at, at + size) if namespace else None
        parent = hash_block((parent, tuple(tokens[at : at + size]), keys))
        hashes.append(parent)
    return hashes


class Sides:
    """The two, with nothing in them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hasher = make_hasher(shape.block_size)
        self.peer = make_manager(
            shape.num_blocks,
            shape.block_size,
            enable_caching=True,
            log_stats=True,
            enable_kv_cache_events=True,
        )
        self.cache = HashBlockCache(PagePool(shape.num_blocks, shape.block_size))
        self.heard: list[Stored | Evicted | Cleared] = []
        self.cache.events.append(self.heard.append)
        self.ended = np.zeros(5, np.int64)
        """Statistics of the steps that have ended, as vLLM counted them."""
        self.counts: Counter[str] = Counter()

    def same(self, what: str, peer: object, ours: object) -> None:
        if peer != ours:
            raise Difference(f"{what}: vLLM {peer}, radixcache {ours}")

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
        if isinstance(event, Cleared):
            return ("cleared",)
        size = self.shape.block_size
        tokens = event.tokens.tolist()
        hashes = chain(tokens, size, as_block_namespace(event.namespace))
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

    def compare_statistics(self) -> None:
        peer = self.ended + counted(self.peer.prefix_cache_stats)
        self.same("statistics", peer.tolist(), counted(self.cache.stats).tolist())

    def commit(self) -> None:
        """The step is over, and its statistics are taken."""
        self.cache.commit()
        self.ended = self.ended + counted(self.peer.prefix_cache_stats)
        self.peer.make_prefix_cache_stats()  # which begins anew


def as_plain(event: object) -> tuple[Any, ...]:
    if isinstance(event, BlockStored):
        return ("stored", event.block_hashes, event.parent_block_hash, list(event.token_ids))
    if isinstance(event, BlockRemoved):
        (block_hash,) = event.block_hashes
        return ("removed", block_hash)
    assert isinstance(event, AllBlocksCleared)
    return ("cleared",)
