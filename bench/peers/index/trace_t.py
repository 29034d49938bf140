"""Trace T: many conversations over one system prompt, in a pool that holds a part of them.

500 conversations of 8 turns share a system prompt of 1,000 tokens; a turn adds 200 tokens of the
user and 300 generated ones. The turns come in a seeded random order, 8 requests run at a time, and
the pool holds 30 % of all distinct tokens. The replay below is a scheduler reduced to its calls:
each step decodes one token of every running request, then admits at most one waiting one, whose
prompt it prefills; the last token that a turn generates gets no KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class TraceT:
    """The numbers that define the trace; the defaults are the published ones."""

    seed: int = 0
    conversations: int = 500
    turns: int = 8
    system: int = 1000
    user: int = 200
    generated: int = 300
    in_flight: int = 8
    pool_share: float = 0.3
    vocabulary: int = 128_000

    @property
    def turn(self) -> int:
        """Tokens that a turn adds."""
        return self.user + self.generated

    @property
    def requests(self) -> int:
        """Turns of all conversations."""
        return self.conversations * self.turns

    @property
    def footprint(self) -> int:
        """Distinct tokens of the whole trace."""
        return self.system + self.requests * self.turn

    def num_pages(self, page_size: int) -> int:
        """Pages of the pool."""
        return int(self.footprint * self.pool_share) // page_size

    def texts(self) -> list[Tokens]:
        """Each conversation's tokens, the system prompt and every turn, int32.

        Two conversations share the system prompt and not one token more.
        """
        rng = np.random.default_rng(self.seed)
        system = rng.integers(0, self.vocabulary, self.system, dtype=np.int32)
        first = rng.permutation(self.vocabulary)[: self.conversations].astype(np.int32)
        size = self.turns * self.turn - 1
        return [
            np.concatenate(
                (system, first[i : i + 1], rng.integers(0, self.vocabulary, size, dtype=np.int32))
            )
            for i in range(self.conversations)
        ]

    def order(self) -> list[int]:
        """The conversation of each request, in the order in which they come."""
        rng = np.random.default_rng(self.seed + 1)
        order = np.repeat(np.arange(self.conversations), self.turns)
        rng.shuffle(order)
        return [int(conversation) for conversation in order]


@dataclass
class Request:
    """One turn: `num_prompt` tokens to look up and prefill, then decoding up to `num_tokens`."""

    number: int
    conversation: int
    num_prompt: int
    num_tokens: int
    """Tokens whose KV is written: all but the last generated one."""
    done: int = field(default=0)
    """Tokens whose KV is written so far."""


class Replayed(Protocol):
    """What a trace is replayed against: a cache as its scheduler drives it, or a simulation."""

    def decode(self, requests: list[Request]) -> None:
        """Make room for the next token of each request; `request.done` are written already."""

    def admit(self, request: Request) -> int:
        """Look the prompt up, make room for the rest, prefill; returns the tokens hit."""

    def end_step(self) -> None:
        """The step ran: everything that it was to write is written."""

    def finish(self, request: Request) -> None:
        """All its tokens are written; what is cached of them stays."""


@dataclass
class HitCount:
    """What a replay counts."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


def arrivals(trace: TraceT) -> Iterator[Request]:
    """The requests of the trace in their order."""
    turns = [0] * trace.conversations
    for number, conversation in enumerate(trace.order()):
        num_prompt = trace.system + turns[conversation] * trace.turn + trace.user
        turns[conversation] += 1
        yield Request(number, conversation, num_prompt, num_prompt + trace.generated - 1)


def replay(trace: TraceT, cache: Replayed) -> Iterator[HitCount]:
    """Run the trace, yielding the counts so far whenever a request has finished.

    A turn waits for the turn before it of its conversation; the others overtake it.
    """
    waiting = deque(arrivals(trace))
    running: list[Request] = []
    count = HitCount()
    while waiting or running:
        decoding = list(running)
        if decoding:
            cache.decode(decoding)
        if len(running) < trace.in_flight and (request := _next(waiting, running)) is not None:
            count.hit_tokens += cache.admit(request)
            count.prompt_tokens += request.num_prompt
            request.done = request.num_prompt
            running.append(request)
        cache.end_step()
        for request in decoding:
            request.done += 1
            if request.done == request.num_tokens:
                running.remove(request)
                cache.finish(request)
                count.requests += 1
                yield count


def _next(waiting: deque[Request], running: list[Request]) -> Request | None:
    """Take the first waiting request whose conversation is not running."""
    busy = {request.conversation for request in running}
    for index, request in enumerate(waiting):
        if request.conversation not in busy:
            del waiting[index]
            return request
    return None
