# mypy: disable-error-code="import-not-found"
"""Drives vLLM's `KVCacheManager` on the CPU as its scheduler does, without a model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus


class Driver:
    """A manager with one group of full attention, and the life of its requests.

    Args:
        options: of the manager.
    """

    def __init__(self, num_blocks: int, block_size: int, **options: Any) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=1 << 20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            **options,
        )
        self._hasher = make_hasher(block_size)

    def request(self, name: str, tokens: list[int], **options: Any) -> Request:
        params = SamplingParams(max_tokens=64)
        return Request(name, tokens, params, None, block_hasher=self._hasher, **options)

    def find(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The cached blocks of a request, and how many tokens they hold."""
        blocks, found, _ = self.manager.get_computed_blocks(request)
        return blocks, int(found)

    def allocate(
        self, request: Request, count: int, found: int = 0, blocks: KVCacheBlocks | None = None
    ) -> KVCacheBlocks | None:
        """Admit a request with what was found and `count` more tokens, or go on with it; the new
        blocks, or None if there is no room."""
        new = self.manager.allocate_slots(request, count, found, blocks)
        if new is not None:
            request.num_computed_tokens += found + count
            request.status = RequestStatus.RUNNING
        return new

    def free(self, request: Request) -> None:
        """The request ends, or is put back; what it computed stays cached."""
        self.manager.free(request)
        request.num_computed_tokens = 0


def make_hasher(block_size: int) -> Any:
    """A hasher of vLLM's requests, by sha256; reads PYTHONHASHSEED when called."""
    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    return kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
