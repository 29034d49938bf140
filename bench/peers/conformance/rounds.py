# mypy: disable-error-code="import-not-found"
"""Random requests, each operation of which goes to both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request as PeerRequest
from vllm.v1.request import RequestStatus

from bench.peers.conformance.sides import Shape, Sides, counted
from radixcache import LeaseError, OutOfPages
from radixcache.block_hash import BlockNamespace, Image
from radixcache.hash_block import BlockLease


@dataclass(eq=False)
class Request:
    """One request and its two halves."""

    peer: PeerRequest
    namespace: BlockNamespace | str | None
    target: int
    """Tokens at which it is finished."""
    lease: BlockLease | None = None

    @property
    def tokens(self) -> list[int]:
        return list(self.peer.all_token_ids)


class Round(Sides):
    """Requests that come, go on, are put back and end; one method for each operation."""

    def __init__(self, shape: Shape, rng: Random) -> None:
        super().__init__(shape)
        self.rng = rng
        self.trace: list[str] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.past: list[list[int]] = [[]]
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
        self.serial += 1
        peer = PeerRequest(
            request_id=str(self.serial),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=64),
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
        request = Request(peer, namespace, target)
        self.waiting.append(request)
        self.past.append(prompt)
        self.trace.append(f"arrive {self.serial} {prompt} {namespace}")

    def admit(self) -> None:
        """What the scheduler does with a waiting request: look up, allocate a chunk or refuse."""
        if not self.waiting or len(self.running) > 7:
            return
        request = self.rng.choice(self.waiting)
        peer, tokens = request.peer, request.tokens
        computed, hit, _ = self.peer.get_computed_blocks(peer)
        found = [block.block_id for block in computed.blocks[0]]
        self.same("match", hit, self.cache.match(tokens, request.namespace))
        lease = self.cache.acquire(tokens, request.namespace, resumed=peer.num_preemptions > 0)
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
        if self.running:
            request = self.rng.choice(self.running)
            self.trace.append(f"abort {request.peer.request_id}")
            self.leave(request)
            self.past.append(request.tokens)

    def preempt(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            self.trace.append(f"preempt {request.peer.request_id}")
            self.give_up(request)

    def look(self) -> None:
        prompt = self.rng.choice(self.past[-40:]) + self.some_tokens(self.rng.randint(1, 3))
        peer = PeerRequest("look", prompt, SamplingParams(), None, block_hasher=self.hasher)
        self.trace.append(f"look {prompt}")
        self.same("match", self.peer.get_computed_blocks(peer)[1], self.cache.match(prompt))

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

    def chunk(self, left: int) -> int:
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
        assert request.lease is not None
        if request.lease.publishing:
            self.commit()
        self.cache.release(request.lease)
        self.peer.free(request.peer)
        request.lease = None
        self.running.remove(request)

    def give_up(self, request: Request) -> None:
        self.leave(request)
        request.peer.num_computed_tokens = 0
        request.peer.num_preemptions += 1
        request.peer.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, request)
        self.counts["preempted"] += 1

    def compare(self) -> None:
        self.compare_pages()
        self.compare_events(ordered=True)
        for request in self.running:
            assert request.lease is not None
            peer_table = self.peer.get_block_ids(request.peer.request_id)[0]
            self.same("page table", peer_table, request.lease.page_table.tolist())
        self.compare_statistics()
        if self.counts["operations"] % 10 == 0:
            self.cache.check()
