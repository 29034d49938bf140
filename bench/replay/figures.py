"""The figures of one run of a scheme: a row in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from radixcache.bench.replay.play import Outcome
from radixcache.bench.schemes.named import Scheme
from radixcache.bench.workloads.workload import Workload


@dataclass
class Figures:
    """One scheme on one workload in one amount of memory.

    Attributes:
        memory_tokens: tokens that the pages hold.
        refused: requests that did not fit or did not end.
        hit_tokens, computed_tokens: prompt tokens found, and prefilled (again after a preemption).
        prompt_tokens: of all requests, refused ones included: they hit nothing.
        computed_by_turn: prefilled tokens per request served, for each turn of a conversation.
        empty_share: of the slots in held pages, how many held no token; 64 samples, index level.
        cache_us: processor time in the cache per request, µs; index level only.
        cold: requests that were served and hit nothing.
        states, recomputed_tokens: slots for recurrent states of a hybrid model, and the prompt
            tokens that were computed again for lack of one, although their KV was cached.
    """

    level: str
    workload: str
    scheme: str
    page_size: int
    memory: str
    memory_tokens: int
    requests: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    preemptions: int
    computed_by_turn: list[float]
    seconds: float
    empty_share: float | None = None
    cache_us: float | None = None
    cold: int = 0
    states: int = 0
    recomputed_tokens: int = 0
    engine: EngineFigures | None = None
    hits: list[int] = field(default_factory=list, repr=False)
    """Tokens hit by each request."""

    @property
    def has_tier(self) -> bool:
        """Whether it has a tier below its memory: `radix-P+Nx`."""
        return "+" in self.scheme

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def computed_share(self) -> float:
        return self.computed_tokens / self.prompt_tokens

    @property
    def spoiled(self) -> str:
        """Refused and preempted requests in words; empty without any."""
        counts = {"refused": self.refused, "preempted": self.preemptions}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)

    @property
    def warm(self) -> int:
        return self.requests - self.refused - self.cold

    def to_json(self) -> dict[str, Any]:
        """The figures for `json.dumps`, without the hits of single requests."""
        return {**{k: v for k, v in asdict(self).items() if k != "hits"}, "hit_rate": self.hit_rate}


@dataclass
class Spread:
    """A figure that was measured several times: its median, least and greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(float(np.median(values)), min(values), max(values))


@dataclass
class EngineFigures:
    """The figures of the engine level. Times in seconds, each over the repeats of the run.

    Attributes:
        throughput: prompt and generated tokens served per second.
        tokens_per_step: of a request that decodes; more than one where drafts are accepted.
    """

    repeats: int
    ttft_p50: Spread
    ttft_p99: Spread
    throughput: Spread
    tokens_per_step: float


def summarise(
    outcomes: Sequence[Outcome], workload: Workload, scheme: Scheme, memory_tokens: int, **more: Any
) -> Figures:
    """The figures that both levels have; `more` are those that `outcomes` do not say."""
    turns = 1 + max(outcome.turn for outcome in outcomes)
    served = [outcome for outcome in outcomes if outcome.error is None]
    by_turn = [[o.computed_tokens for o in served if o.turn == turn] for turn in range(turns)]
    return Figures(
        workload=workload.name,
        scheme=scheme.name,
        page_size=scheme.page_size,
        memory_tokens=memory_tokens,
        requests=len(outcomes),
        refused=sum(outcome.error is not None for outcome in outcomes),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        hit_tokens=sum(outcome.hit_tokens for outcome in outcomes),
        computed_tokens=sum(outcome.computed_tokens for outcome in outcomes),
        recomputed_tokens=sum(outcome.recomputed_tokens for outcome in outcomes),
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        computed_by_turn=[float(np.mean(computed or [0])) for computed in by_turn],
        cold=sum(not outcome.hit_tokens for outcome in served),
        hits=[outcome.hit_tokens for outcome in outcomes],
        **more,
    )
