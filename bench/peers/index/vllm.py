# mypy: disable-error-code="import-not-found"
"""vLLM's `KVCacheManager`, as vLLM's scheduler drives it.

Runs in an environment of its own, with `bench/peers/conformance-requirements.txt`. One
full-attention group, sha256 hashes, its defaults. Tokens are Python lists, as vLLM's
requests hold them. Hashing a prompt is part of a look-up: vLLM does it once per request.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm

from bench.peers.index.base import Index, Tokens
from bench.peers.vllm_manager import Driver


class VLLM(Index):
    """Over blocks of `page_size` tokens; one stays empty."""

    version = vllm.__version__

    def __init__(self, num_tokens: int, page_size: int) -> None:
        torch.set_num_threads(1)
        self.page_size = page_size
        self.driver = Driver(num_tokens // page_size + 1, page_size, enable_caching=True)
        self.taken: list[Any] = []
        self._next = 0

    def query(self, tokens: Tokens) -> Any:
        self._next += 1
        return self.driver.request(str(self._next), tokens.tolist())

    def match(self, query: Any) -> int:
        query.block_hashes.clear()
        query.update_block_hashes()
        return self.driver.find(query)[1]

    def borrow(self, query: Any) -> int:
        query.block_hashes.clear()
        query.update_block_hashes()
        blocks, found = self.driver.find(query)
        if self.driver.allocate(query, query.num_tokens - found, found, blocks) is None:
            raise RuntimeError("vLLM has too few free blocks")
        pages = self.driver.manager.get_block_ids(query.request_id)[0]
        self.driver.free(query)
        return len(pages)

    def store(self, tokens: Tokens) -> None:
        self.borrow(self.query(tokens))

    def evict(self, num_tokens: int) -> None:
        pool = self.driver.manager.block_pool
        self.taken += pool.get_new_blocks(num_tokens // self.page_size)
