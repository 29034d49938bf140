"""radixcache, as its own scheduler drives it."""

from __future__ import annotations

from typing import Literal

import numpy as np

import radixcache
from bench.peers.index.base import Index
from bench.peers.index.trace_t import Request, Tokens
from radixcache import Lease, PagePool, RadixCache

Decoding = Literal["ahead", "token"]
"""How decoded tokens get in: all when the request ends, with room reserved for `AHEAD` at a time,
as our scheduler does; or each reserved and published in the step that computes it."""

AHEAD = 128


class Ours(Index):
    """`RadixCache` over a pool of `num_tokens` tokens."""

    version = radixcache.__version__

    def __init__(
        self, num_tokens: int, page_size: int, texts: list[Tokens], decoding: Decoding = "ahead"
    ) -> None:
        super().__init__(page_size, texts)
        self.cache = RadixCache(PagePool(num_tokens // page_size, page_size))
        self.decoding = decoding
        self.stride = 1 if decoding == "token" else AHEAD
        self.leases: dict[int, Lease] = {}

    def convert(self, tokens: Tokens) -> Tokens:
        return tokens

    def convert_list(self, tokens: list[int]) -> Tokens:
        return np.asarray(tokens, dtype=np.int32)

    def match(self, query: Tokens) -> int:
        return self.cache.match(query)

    def borrow(self, query: Tokens) -> int:
        lease = self.cache.acquire(query)
        pages = lease.page_table
        self.cache.release(lease)
        return len(pages)

    def store(self, key: Tokens) -> None:
        lease = self.prepare_insert(key, 0)[0]
        self.cache.publish(lease, key[lease.num_tokens :])
        self.cache.commit()
        self.cache.release(lease)

    def prepare_insert(self, key: Tokens, cached: int) -> tuple[Lease, Tokens]:
        lease = self.cache.acquire(key)
        self.cache.reserve(lease, len(key))
        return lease, key[lease.num_tokens :]

    def insert(self, prepared: tuple[Lease, Tokens]) -> None:
        self.cache.publish(*prepared)

    def after_insert(self, prepared: tuple[Lease, Tokens]) -> None:
        self.cache.commit()
        self.cache.release(prepared[0])

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(num_tokens // self.page_size)

    def prefill_in_chunks(self, key: Tokens, chunk: int) -> None:
        cache = self.cache
        lease = cache.acquire(key)
        for start in range(lease.num_tokens, len(key), chunk):
            part = key[start : start + chunk]
            cache.reserve(lease, start + len(part))
            cache.publish(lease, part)
            cache.commit()
        cache.release(lease)

    # -- trace T -------------------------------------------------------------------------------

    def admit(self, request: Request) -> int:
        cache, watch = self.cache, self.watch
        prompt = self.texts[request.conversation][: request.num_prompt]
        watch.start()
        lease = cache.acquire(prompt)
        watch.lap("match + lock")
        cache.reserve(lease, len(prompt))
        watch.lap("allocate + evict")
        hit = lease.num_tokens
        cache.publish(lease, prompt[hit:])
        watch.lap("insert prompt")
        self.leases[request.number] = lease
        return hit

    def decode(self, requests: list[Request]) -> None:
        cache, leases, watch = self.cache, self.leases, self.watch
        watch.start()
        for request in requests:
            lease = leases[request.number]
            if request.done >= lease.capacity:
                cache.reserve(lease, min(request.done + self.stride, request.num_tokens))
        watch.lap("decode")
        if self.decoding == "token":
            for request in requests:
                tokens = self.texts[request.conversation][request.done : request.done + 1]
                cache.publish(leases[request.number], tokens)
            watch.lap("decode")

    def end_step(self) -> None:
        self.watch.start()
        self.cache.commit()
        self.watch.lap("commit")

    def finish(self, request: Request) -> None:
        lease = self.leases.pop(request.number)
        text = self.texts[request.conversation]
        self.watch.start()
        if lease.num_tokens < request.done:
            self.cache.publish(lease, text[lease.num_tokens : request.done], written=True)
        self.cache.release(lease)
        self.watch.lap("finish")
