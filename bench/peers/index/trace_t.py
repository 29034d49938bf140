"""Trace T: many conversations over one system prompt, in a pool that holds a part of them.

500 conversations of 8 turns share a system prompt of 1,000 tokens; a turn adds 200 tokens of the
user and 300 generated ones. The turns come in a seeded random order, 8 requests run at a time, and
the pool holds 30 % of all distinct tokens. The replay below is a scheduler reduced to its calls:
each step decodes one token of every running request, then admits at most one waiting one, whose
prompt it prefills; the last token that a turn generates gets no KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from radixcache.base import Tokens as Tokens


@dataclass(eq=False)
class Request:
    """One turn: `num_prompt` tokens to look up and prefill, then decoding up to `num_tokens`.

    Attributes:
        num_tokens: tokens whose KV is written: all but the last generated one.
        done: tokens whose KV is written so far.
    """

    number: int
    conversation: int
    num_prompt: int
    num_tokens: int
    done: int = 0


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
        return self.conversations * self.turns

    def num_pages(self, page_size: int) -> int:
        """Pages of the pool."""
        distinct = self.system + self.requests * self.turn
        return int(distinct * self.pool_share) // page_size

    def texts(self) -> list[Tokens]:
        """Each conversation's tokens, the system prompt and every turn.

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

    def arrivals(self) -> Iterator[Request]:
        """The requests in their order."""
        order = np.repeat(np.arange(self.conversations), self.turns)
        np.random.default_rng(self.seed + 1).shuffle(order)
        turns = [0] * self.conversations
        for number, conversation in enumerate(order.tolist()):
            num_prompt = self.system + turns[conversation] * self.turn + self.user
            turns[conversation] += 1
            yield Request(number, conversation, num_prompt, num_prompt + self.generated - 1)


class Replayed(Protocol):
    """A cache as its scheduler drives it, or a simulation, against which a trace is replayed.

    - `decode` makes room for the next token of each request; `done` are written already.
    - `admit` looks the prompt up, makes room for the rest, prefills; returns the tokens hit.
    - `end_step`: the step ran, and everything that it was to write is written.
    - `finish`: all tokens of the request are written; what is cached of them stays.
    """

    def decode(self, requests: list[Request]) -> None: ...
    def admit(self, request: Request) -> int: ...
    def end_step(self) -> None: ...
    def finish(self, request: Request) -> None: ...


@dataclass
class HitCount:
    """The counts of a replay."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


def replay(trace: TraceT, cache: Replayed) -> Iterator[HitCount]:
    """Run the trace, yielding the counts so far whenever a request has finished.

    A turn waits for the turn before it of its conversation; the others overtake it.
    """
    waiting = list(trace.arrivals())
    running: list[Request] = []
    count = HitCount()
    while waiting or running:
        decoding = list(running)
        if decoding:
            cache.decode(decoding)
        busy = {request.conversation for request in running}
        request = next((r for r in waiting if r.conversation not in busy), None)
        if request is not None and len(running) < trace.in_flight:
            waiting.remove(request)
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
