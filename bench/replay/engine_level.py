"""The engine level: a workload through the runtime with a real model, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from radixcache.bench.replay.figures import EngineFigures, Figures, Spread, summarise
from radixcache.bench.replay.index_level import Serving
from radixcache.bench.replay.play import Outcome, WallClock, play
from radixcache.bench.schemes.named import Scheme
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import InvalidRequest
from radixcache.runtime.engine.build import explain_and_draft
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.explain import Explainer
from radixcache.runtime.engine.rows import Row
from radixcache.runtime.engine.sampler import PendingStep, Sampler
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.params import SamplingParams

_CERTAIN = torch.finfo(torch.float32).max
"""A logit above all others; an infinite one is no number to the engine."""


class ScriptedSampler(Sampler):
    def __init__(self, model: PagedModel, answers: dict[Request, Tokens]) -> None:
        super().__init__(model.device, 0, model.eos_token_ids)
        self._answers = answers

    @torch.inference_mode()
    def sample(self, rows: list[Row], logits: torch.Tensor) -> PendingStep:
        """The sampler's own, of logits in which the script is certain."""
        if rows:
            answers = [self._answers[row.sequence.request] for row in rows]
            script = [int(a[len(row.generated)]) for a, row in zip(answers, rows, strict=True)]
            logits[torch.arange(len(script)), torch.tensor(script)] = _CERTAIN
        return super().sample(rows, logits)


class ScriptedEngine(Engine):
    """The runtime's engine, whose requests generate what the workload says.

    The model computes every token; only its choice is overruled, so that every scheme goes on with
    the same tokens, and so does the index level.
    """

    def __init__(
        self, model: PagedModel, kv_pool: KVPool, scheme: Scheme, serving: Serving
    ) -> None:
        cache = scheme.make(kv_pool.num_pages * kv_pool.page_size)
        drafts: dict[str, Any] = {}
        if serving.speculate:
            texts = Explainer(cache)
            proposer, on_publish = explain_and_draft(texts, model.eos_token_ids)
            drafts = {"proposer": proposer, "on_publish": on_publish, "catch_up": texts.catch_up}
        scheduler = Scheduler(  # no logits cache: every scheme computes a prompt's last token
            cache,
            serving.max_num_batched_tokens,
            serving.max_num_seqs,
            serving.schedule_policy,
            **drafts,
        )
        self._answers: dict[Request, Tokens] = {}
        sampler = ScriptedSampler(model, self._answers)
        super().__init__(model, kv_pool, cache, scheduler, sampler=sampler, overlap=False)

    def add(self, prompt: Tokens, answer: Tokens) -> Request:
        params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
        request = self.add_request(prompt, params)
        self._answers[request] = answer
        return request


@dataclass
class Timed:
    outcomes: list[Outcome]
    seconds: float
    accepted_tokens: int


def run_engine(
    workload: Workload,
    schemes: List[Scheme],
    memory_tokens: int,
    serving: Serving,
    model: PagedModel,
    *,
    repeats: int,
    memory: str = "",
    progress: Callable[[], object] = lambda: None,
) -> list[Figures]:
    """Run a workload in every scheme, `repeats` times after one run that does not count.

    The schemes take turns within each repeat, and every other repeat runs them backwards, so that
    whatever else the machine does hits all of them alike. Each run starts with an empty cache.

    Raises:
        InvalidRequest: a request is longer than the model's context.
    """
    if workload.longest > model.max_context:
        raise InvalidRequest(
            f"{workload.name}: a request of {workload.longest} tokens, and the model's context has "
            f"{model.max_context}"
        )
    pools = [model.allocate(memory_tokens // m.page_size, m.page_size) for m in schemes]
    runs: list[list[Timed]] = [[] for _ in schemes]
    for repeat in range(repeats + 1):
        order = list(zip(schemes, pools, runs, strict=True))
        for scheme, pool, timed in order if repeat % 2 else reversed(order):
            engine = ScriptedEngine(model, pool, scheme, serving)
            start = time.perf_counter()
            outcomes = play(workload, serving.arrivals, engine, WallClock(), progress)
            seconds = time.perf_counter() - start
            engine.cache.check()
            if repeat:
                proposer = engine.scheduler.proposer
                accepted = proposer.num_accepted_tokens.total() if proposer else 0
                timed.append(Timed(outcomes, seconds, accepted))
    found = []
    for scheme, timed in zip(schemes, runs, strict=True):
        figures = summarise(
            timed[0].outcomes,
            workload,
            scheme,
            memory_tokens,
            memory=memory,
            level="engine",
            seconds=statistics.median(run.seconds for run in timed),
        )
        if figures.refused < figures.requests:
            figures.engine = _times(workload, timed)
        found.append(figures)
    return found


def _times(workload: Workload, runs: list[Timed]) -> EngineFigures:
    ttfts = [[o.ttft for o in run.outcomes if o.ttft is not None] for run in runs]
    served = workload.prompt_tokens + workload.answer_tokens
    percentiles = [np.percentile(times, (50, 99)).tolist() for times in ttfts]
    accepted = sum(run.accepted_tokens for run in runs)
    generated = workload.answer_tokens * len(runs)
    p50, p99 = map(Spread.of, zip(*percentiles, strict=True))
    return EngineFigures(
        repeats=len(runs),
        ttft_p50=p50,
        ttft_p99=p99,
        throughput=Spread.of([served / run.seconds for run in runs]),
        tokens_per_step=generated / (generated - accepted),
    )
