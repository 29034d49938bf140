"""Trace T under exact LRU, token by token: what the hit rate has to be.

Nothing here is shared with the index: no tree, no nodes, no page tables. A conversation's resident
tokens are a count, because they go from the last one on: an earlier token was used at least as
recently. Tokens are taken and evicted one at a time. Page size 1.
"""

from __future__ import annotations

from heapq import heappop, heappush

from bench.peers.index.trace_t import Request, TraceT


class TokenLRU:
    """A `bench.peers.index.trace_t.Replayed` that counts instead of caching.

    The system prompt belongs to owner -1, everything after it to its conversation. A token is used
    when a request that ran over it finishes; it can go while no running request uses it and all
    tokens that extend it are gone. So the system prompt stays: somebody always runs.
    """

    def __init__(self, trace: TraceT) -> None:
        self.trace = trace
        self.free = trace.num_pages(1)
        self.clock = 0
        self.resident: dict[int, int] = {}
        """How many tokens of each owner are resident, from its first on."""
        self.used: dict[int, int] = {}
        """When each conversation was used last."""
        self.running: set[int] = set()
        self.heap: list[tuple[int, int]] = []
        """(time of its last use, conversation), the least recently used first."""

    def decode(self, requests: list[Request]) -> None:
        for request in requests:
            self._take(request.conversation, 1)

    def admit(self, request: Request) -> int:
        own = self.resident.get(request.conversation, 0)
        system = self.resident.get(-1, 0)
        hit = system + own if system == self.trace.system else system
        self.running.add(request.conversation)
        missing = request.num_prompt - hit
        new_system = self.trace.system - system
        if new_system:
            self._take(-1, new_system)
        self._take(request.conversation, missing - new_system)
        return hit

    def end_step(self) -> None:
        pass

    def finish(self, request: Request) -> None:
        self.running.remove(request.conversation)
        self.clock += 1
        self.used[request.conversation] = self.clock
        heappush(self.heap, (self.clock, request.conversation))

    def _take(self, owner: int, count: int) -> None:
        """Give `owner` that many tokens more, one at a time."""
        for _ in range(count):
            if not self.free:
                self._evict_one()
            self.free -= 1
            self.resident[owner] = self.resident.get(owner, 0) + 1

    def _evict_one(self) -> None:
        """Drop the deepest token of the conversation that was used least recently."""
        while True:
            time, owner = self.heap[0]
            if self.used[owner] == time and owner not in self.running and self.resident[owner]:
                break
            heappop(self.heap)  # it runs, was used later, or is gone
        self.resident[owner] -= 1
        self.free += 1
