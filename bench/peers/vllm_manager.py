# mypy: disable-error-code="import-not-found"
"""Makes vLLM's `KVCacheManager` and its hashes on the CPU, without a model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec


def make_manager(num_blocks: int, block_size: int, **options: Any) -> KVCacheManager:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=1 << 20,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        **options,
    )


def make_hasher(block_size: int) -> Any:
    """A hasher of vLLM's requests, by sha256; reads PYTHONHASHSEED when called."""
    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    return kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
