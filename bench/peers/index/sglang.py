# mypy: disable-error-code="import-not-found, misc"
"""SGLang's `UnifiedRadixCache` on the CPU, as SGLang's scheduler drives it.

Runs in an environment of its own, with `bench/peers/sglang-requirements.txt`. What surrounds the
index in SGLang (its real `Req`, tensors for the GPU, request metrics) is left out, which favours
SGLang. Tokens are `array("q")`, as SGLang 0.5.23 keeps them.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import sglang
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocation import (
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from bench.peers.index.base import Index
from bench.peers.index.trace_t import Request, Tokens

MAX_REQUESTS = 16
MAX_LENGTH = 1 << 18


class _Req:
    """The fields of SGLang's `Req` that `UnifiedRadixCache` reads and writes."""

    extra_key = cache_salt = session = session_id = kv_rotation_base = None
    skip_radix_cache_insert = False

    def __init__(self, rid: str, prompt: Any) -> None:
        self.rid = rid
        self.priority = 0
        self.origin_input_ids = prompt
        self.full_untruncated_fill_ids = prompt[:]
        self.kv = ReqKvInfo()
        self.lock: Any = None
        self.last_node: Any = None
        self.prefix_len = 0
        self.is_done = False

    def finished(self) -> bool:
        return self.is_done


def _as_array(tokens: Tokens) -> Any:
    key = array("q")
    key.frombytes(tokens.astype(np.int64).tobytes())
    return key


class SGLang(Index):
    """SGLang's index, with the tree core `core`: "rust" or "python".

    Every step allocates a slot for each running request and writes it to the request's row.
    """

    version = sglang.__version__

    def __init__(self, num_tokens: int, page_size: int, texts: list[Tokens], core: str) -> None:
        torch.set_num_threads(1)
        super().__init__(page_size, texts)
        kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        sizes = (num_tokens,) if page_size == 1 else (num_tokens, page_size)
        self.slots = kind(*sizes, torch.int64, "cpu", None, need_sort=False)
        self.rows = ReqToTokenPool(MAX_REQUESTS, MAX_LENGTH, "cpu", enable_memory_saver=False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.slots,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        if self.cache._tree_core_backend != core:
            raise RuntimeError(f"SGLang fell back to its {self.cache._tree_core_backend} core")
        self.requests: dict[int, _Req] = {}
        self._batch: tuple[list[int], Any, Any, Any] = ([], None, None, None)

    def convert(self, tokens: Tokens) -> Any:
        return _as_array(tokens)

    def convert_list(self, tokens: list[int]) -> Any:
        return array("q", tokens)

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

    def store(self, key: Any) -> None:
        size = len(key) // self.page_size * self.page_size
        self.insert(self.prepare_insert(key[:size], size - self.page_size))

    def prepare_insert(self, key: Any, cached: int) -> Any:
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(key, limit=cached)))
        shared = self.cache.path_device_indices(found.last_device_node)
        new = self.slots.alloc(len(key) - len(shared))
        return RadixKey(key), torch.cat((shared, new)), len(shared)

    def insert(self, prepared: Any) -> None:
        key, value, cached = prepared
        self.cache.insert(InsertParams(key=key, value=value, prev_prefix_len=cached))

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def prefill_in_chunks(self, key: Any, chunk: int) -> None:
        req = self._match(_Req("chunked", key))
        for end in range(chunk, len(key) + 1, chunk):
            self._extend(req, end)
            self.cache.checkpoint(req, up_to=end)
            req.prefix_len = end
        self._release(req, len(key))

    # -- the life of a request -----------------------------------------------------------------

    def _match(self, req: _Req) -> _Req:
        key = RadixKey(req.full_untruncated_fill_ids, limit=len(req.origin_input_ids) - 1)
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len = found.device_prefix_len
        req.last_node = found.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        return req

    def _extend(self, req: _Req, end: int) -> None:
        """Slots for [req.prefix_len, end), and the request's row of slot numbers."""
        start = req.prefix_len
        if req.kv.holds_kv:
            prefix = self.rows.req_to_token[req.kv.req_pool_idx, :start].to(torch.int64)
        else:
            prefix = self.cache.prefix_device_indices(req)
        (row,) = self.rows.alloc([req])
        if self.page_size == 1:
            new = alloc_token_slots(self.cache, end - start)
        else:
            starts, ends = torch.tensor([start]), torch.tensor([end])
            last = prefix[-1:] if start else torch.full((1,), -1)
            new = alloc_paged_token_slots_extend(
                self.cache, starts, starts, ends, ends, last, end - start
            )
        self.rows.write((row, slice(0, start)), prefix)
        self.rows.write((row, slice(start, end)), new)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def _release(self, req: _Req, length: int) -> None:
        req.is_done = True
        self.cache.checkpoint(req, up_to=length)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, length)])
        self.cache.unlock(req.lock)
        self.rows.free(req)

    # -- trace T -------------------------------------------------------------------------------

    def admit(self, request: Request) -> int:
        watch = self.watch
        prompt = _as_array(self.texts[request.conversation][: request.num_prompt])
        req = _Req(str(request.number), prompt)
        watch.start()
        self._match(req)
        watch.lap("match + lock")
        hit = req.prefix_len
        self._extend(req, len(prompt))
        watch.lap("allocate + evict")
        self.cache.checkpoint(req, up_to=len(prompt))
        watch.lap("insert prompt")
        self.requests[request.number] = req
        return hit

    def decode(self, requests: list[Request]) -> None:
        numbers = [request.number for request in requests]
        if self._batch[0] != numbers:
            rows = torch.tensor([self.requests[n].kv.req_pool_idx for n in numbers])
            lengths = torch.tensor([request.done for request in requests])
            self._batch = (numbers, rows, lengths, lengths.clone())
        _, rows, lengths, lengths_cpu = self._batch
        self.watch.start()
        if self.page_size == 1:
            new = alloc_token_slots(self.cache, len(numbers))
        else:
            last = self.rows.req_to_token[rows, lengths - 1]
            new = alloc_paged_token_slots_decode(self.cache, lengths + 1, lengths_cpu + 1, last)
        self.rows.write((rows, lengths.clone()), new.to(torch.int32))
        self.watch.lap("decode")
        lengths += 1
        lengths_cpu += 1

    def finish(self, request: Request) -> None:
        req = self.requests.pop(request.number)
        text = self.texts[request.conversation]
        generated = _as_array(text[request.num_prompt : request.num_tokens])
        req.kv.kv_allocated_len = req.kv.kv_committed_len = request.num_tokens
        self.watch.start()
        req.full_untruncated_fill_ids.extend(generated)
        self._release(req, request.num_tokens)
        self.watch.lap("finish")
