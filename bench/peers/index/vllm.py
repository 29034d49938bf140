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
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request as PeerRequest
from vllm.v1.request import RequestStatus

from bench.peers.index.base import Index
from bench.peers.index.trace_t import Request, Tokens
from bench.peers.vllm_manager import make_hasher, make_manager


class VLLM(Index):
    """Over blocks of `page_size` tokens; one stays empty."""

    version = vllm.__version__

    def __init__(self, num_tokens: int, page_size: int, texts: list[Tokens]) -> None:
        torch.set_num_threads(1)
        super().__init__(page_size, texts)
        self.hasher = make_hasher(page_size)
        self.manager = make_manager(num_tokens // page_size + 1, page_size, enable_caching=True)
        self.requests: dict[int, Any] = {}
        self.taken: list[Any] = []
        self._next = 0

    def convert(self, tokens: Tokens) -> list[int]:
        return list(map(int, tokens))

    def convert_list(self, tokens: list[int]) -> list[int]:
        return tokens

    def _request(self, key: list[int]) -> Any:
        self._next += 1
        params = SamplingParams(max_tokens=1 << 17)
        request = PeerRequest(str(self._next), key, params, None, block_hasher=None)
        request._block_hasher = self.hasher
        return request

    def query(self, key: list[int]) -> Any:
        return self._request(key)

    def match(self, query: Any) -> int:
        query.block_hashes.clear()
        query.update_block_hashes()
        return int(self.manager.get_computed_blocks(query)[1])

    def borrow(self, query: Any) -> int:
        query.block_hashes.clear()
        query.update_block_hashes()
        self._allocate(query, query.num_tokens)
        pages = self.manager.get_block_ids(query.request_id)[0]
        self.manager.free(query)
        query.num_computed_tokens = 0
        return len(pages)

    def _allocate(self, request: Any, end: int) -> int:
        """Admit with a prefill up to `end`; returns the tokens found."""
        blocks, found, _ = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, end - found, found, blocks)
        if new is None:
            raise RuntimeError("vLLM has too few free blocks")
        request.num_computed_tokens = end
        request.status = RequestStatus.RUNNING
        return int(found)

    def store(self, key: list[int]) -> None:
        request = self._request(key)
        request.update_block_hashes()
        self._allocate(request, len(key))
        self.manager.free(request)

    def prepare_insert(self, key: list[int], cached: int) -> Any:
        return self._request(key)

    def insert(self, prepared: Any) -> None:
        prepared.update_block_hashes()
        self._allocate(prepared, prepared.num_tokens)

    def after_insert(self, prepared: Any) -> None:
        self.manager.free(prepared)

    def evict(self, num_tokens: int) -> None:
        self.taken += self.manager.block_pool.get_new_blocks(num_tokens // self.page_size)

    def prefill_in_chunks(self, key: list[int], chunk: int) -> None:
        request = self._request(key)
        request.update_block_hashes()
        self._allocate(request, chunk)
        for _ in range(chunk, len(key), chunk):
            self.manager.allocate_slots(request, chunk)
            request.num_computed_tokens += chunk
        self.manager.free(request)

    # -- trace T -------------------------------------------------------------------------------

    def admit(self, request: Request) -> int:
        watch = self.watch
        text = self.texts[request.conversation]
        peer = self._request(text[: request.num_prompt].tolist())
        watch.start()
        peer.update_block_hashes()
        watch.lap("hash")
        blocks, found, _ = self.manager.get_computed_blocks(peer)
        watch.lap("match + lock")
        new = self.manager.allocate_slots(peer, request.num_prompt - found, found, blocks)
        watch.lap("allocate + evict")
        if new is None:
            raise RuntimeError("vLLM has too few free blocks")
        peer.num_computed_tokens = request.num_prompt
        peer.status = RequestStatus.RUNNING
        self.requests[request.number] = peer
        return int(found)

    def decode(self, requests: list[Request]) -> None:
        steps = [
            (self.requests[request.number], int(self.texts[request.conversation][request.done]))
            for request in requests
        ]
        allocate, watch = self.manager.allocate_slots, self.watch
        watch.start()
        for peer, token in steps:
            peer.append_output_token_ids(token)
        watch.lap("hash")
        for peer, _ in steps:
            allocate(peer, 1)
            peer.num_computed_tokens += 1
        watch.lap("decode")

    def finish(self, request: Request) -> None:
        peer = self.requests.pop(request.number)
        self.watch.start()
        self.manager.free(peer)
        self.watch.lap("finish")
