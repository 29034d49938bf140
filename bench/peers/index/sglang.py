# mypy: disable-error-code="import-not-found, misc"
"""SGLang's `UnifiedRadixCache` on the CPU, as SGLang's scheduler drives it.

Runs in an environment of its own, with `bench/peers/sglang-requirements.txt`. What surrounds the
index in SGLang (requests, tensors for the GPU, metrics) is left out, which favours SGLang. Tokens
are `array("q")`, as SGLang 0.5.23 keeps them.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import sglang
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from bench.peers.index.base import Index, Tokens


class SGLang(Index):
    """SGLang's index, with the tree core `core`: "rust" or "python"."""

    version = sglang.__version__

    def __init__(self, num_tokens: int, page_size: int, core: str) -> None:
        torch.set_num_threads(1)
        self.page_size = page_size
        kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        sizes = (num_tokens,) if page_size == 1 else (num_tokens, page_size)
        self.slots = kind(*sizes, torch.int64, "cpu", None, need_sort=False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(1, 1, "cpu", enable_memory_saver=False),
                token_to_kv_pool_allocator=self.slots,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        if self.cache._tree_core_backend != core:
            raise RuntimeError(f"SGLang fell back to its {self.cache._tree_core_backend} core")

    def query(self, tokens: Tokens) -> Any:
        key = array("q")
        key.frombytes(tokens.astype(np.int64).tobytes())
        return key

    def match(self, query: Any) -> int:
        params = MatchPrefixParams(key=RadixKey(query, limit=len(query) - 1))
        return int(self.cache.match_prefix(params).device_prefix_len)

    def borrow(self, query: Any) -> int:
        params = MatchPrefixParams(key=RadixKey(query, limit=len(query) - 1))
        node = self.cache.match_prefix(params).last_device_node
        lock = self.cache.lock(node)
        indices = self.cache.path_device_indices(node)
        self.cache.unlock(lock)
        return len(indices)

    def store(self, tokens: Tokens) -> None:
        size = len(tokens) // self.page_size * self.page_size
        key = self.query(tokens[:size])
        params = MatchPrefixParams(key=RadixKey(key, limit=size - self.page_size))
        shared = self.cache.path_device_indices(self.cache.match_prefix(params).last_device_node)
        value = torch.cat((shared, self.slots.alloc(size - len(shared))))
        self.cache.insert(InsertParams(key=RadixKey(key), value=value, prev_prefix_len=len(shared)))

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))
