"""A workload: requests in their order of arrival, whose later turns wait for earlier ones.

A request knows its answer beforehand, so that every scheme, and both levels of the benchmark, see
the same tokens. Prompts and answers are made when the request arrives: a trace of 145 M tokens need
not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from radixcache.tokens import Tokens as Tokens


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        prompt_tokens, answer_tokens: how many `prompt()` and `answer()` give; each at least 1.
        prompt: makes the prompt, int32.
        answer: makes the tokens that will be generated, int32. The last one gets no KV.
        after: index of the request that must have ended before this one can come.
        turn: how many requests of the same conversation came before.
        at: seconds from the start, if the workload has times of its own.
        together: comes at the same moment as the request before it, as one of a burst.
        template_tokens: leading tokens known before any request comes (a system prompt, examples,
            a document), which an operator could have registered.
        stem_tokens: leading tokens that the sender knows to be shared; no fewer.
    """

    prompt_tokens: int
    answer_tokens: int
    prompt: Callable[[], Tokens]
    answer: Callable[[], Tokens]
    after: int | None = None
    turn: int = 0
    at: float = 0.0
    together: bool = False
    template_tokens: int = 0
    stem_tokens: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is in memory when the request ends."""
        return self.prompt_tokens + self.answer_tokens - 1

    def tokens(self) -> Tokens:
        """[kv_tokens] the tokens that get KV."""
        return np.concatenate((self.prompt(), self.answer()[:-1]))


@dataclass
class Workload:
    """Requests and where they come from.

    Attributes:
        shape: what was generated or read, in one sentence.
    """

    name: str
    shape: str
    arrivals: list[Arrival] = field(default_factory=list)

    def add(
        self,
        parts: Sequence[Tokens],
        answer: Tokens,
        *,
        after: int | None = None,
        turn: int = 0,
        together: bool = False,
        template: int = 0,
        stem: int = 0,
    ) -> int:
        """Append a request whose prompt is `parts` one after the other; returns its index.

        The parts are kept by reference, so that prompts with a common prefix share its memory. The
        first `template` of them are known before any request comes, the first `stem` to the
        client that sends the request.
        """
        self.arrivals.append(
            Arrival(
                sum(map(len, parts)),
                len(answer),
                partial(np.concatenate, tuple(parts)),
                lambda: answer,
                after=after,
                turn=turn,
                together=together,
                template_tokens=sum(map(len, parts[:template])),
                stem_tokens=sum(map(len, parts[: max(template, stem)])),
            )
        )
        return len(self.arrivals) - 1

    def templates(self) -> list[Tokens]:
        """The distinct beginnings of prompts that are known before any request comes."""
        return self._beginnings([arrival.template_tokens for arrival in self.arrivals])

    def stems(self) -> list[Tokens]:
        """The distinct beginnings that senders know to be shared, less a prompt's last token."""
        return self._beginnings([arrival.stem_tokens for arrival in self.arrivals])

    def _beginnings(self, lengths: list[int]) -> list[Tokens]:
        distinct: dict[bytes, Tokens] = {}
        for arrival, length in zip(self.arrivals, lengths, strict=True):
            if length:
                tokens = arrival.prompt()[: min(length, arrival.prompt_tokens - 1)]
                distinct.setdefault(tokens.tobytes(), tokens)
        return list(distinct.values())

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def answer_tokens(self) -> int:
        return sum(arrival.answer_tokens for arrival in self.arrivals)

    @property
    def longest(self) -> int:
        """The most tokens that one request holds, its whole answer included."""
        return max(arrival.kv_tokens + 1 for arrival in self.arrivals)
