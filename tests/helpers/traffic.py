"""Random arrivals at an engine: requests, aborts, evictions and steps that fail."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from radixcache import SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduling.saved_state_planner import SavedStatePlanner
from radixcache.runtime.request import Request
from tests.helpers.engines import assert_no_page_is_lost, generated

NOTHING_LEFT: dict[str, Any] = {
    "stop_token_ids": [5], "allowed_token_ids": [5], "min_tokens": 1, "max_tokens": 9,
}  # fmt: skip
"""Options of a request that fails: until its one token comes, it is forbidden."""

Asked = tuple[list[int], SamplingParams, str | None]
"""A prompt, what is asked of it, and its namespace."""


def play(
    engine: Engine,
    rng: random.Random,
    num_requests: int,
    ask: Callable[[list[list[int]]], Asked],
    verify: Callable[[Request], None],
    *,
    arrivals: float = 0.15,
    failures: float = 0.1,
    resets: float = 0.05,
) -> Counter[str]:
    """Add `num_requests` and step to the end of all, with all checks after every step.

    Args:
        ask: draws a request, given the texts of the last ones that were finished.
        verify: asserts that a finished request has got its answer.
        arrivals: the chance that one request comes before a step, or five at once; one of five of
            such steps aborts a request.
        failures: the chance that a step fails, before the model or its graph has run or after.
        resets: the chance that the cache is reset while nobody runs.
    """
    live: list[Request] = []
    texts: list[list[int]] = []
    seen: Counter[str] = Counter()

    def flaky(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            fails = rng.random() < failures
            if fails and rng.random() < 0.5:  # nothing is written
                raise RuntimeError("device lost")
            result = run(*args)
            if fails and result is not None:
                raise RuntimeError("device lost")
            return result

        return call

    with ExitStack() as stack:
        for owner, name in ((engine.model, "forward"), (engine.runner.graphs, "run")):
            if owner is not None:
                stack.enter_context(patch.object(owner, name, flaky(getattr(owner, name))))
        while seen["asked"] < num_requests or live:
            if rng.random() < arrivals:
                for _ in range(min(rng.choice([1, 1, 5]), num_requests - seen["asked"])):
                    prompt, params, namespace = ask(texts)
                    live.append(engine.add_request(prompt, params, namespace=namespace))
                    seen["asked"] += 1
            if live and rng.random() < arrivals / 5:
                engine.abort(live.pop(rng.randrange(len(live))))
            if rng.random() < 0.02:
                engine.cache.evict(rng.randrange(5))
            if not engine.has_work and rng.random() < resets:
                engine.reset_cache()
            seen["ahead"] += engine._ahead is not None
            try:
                engine.step()
            except RuntimeError:
                seen["failures"] += 1
            engine.check()
            for request in [request for request in live if request.finished]:
                live.remove(request)
                seen["finished"] += 1
                if request.params.allowed_token_ids == request.params.stop_token_ids == [5]:
                    assert request.error is not None
                    seen["nothing left"] += 1
                    continue
                assert request.error is None, request.error
                verify(request)
                seen["hits"] += request.output().num_cached_tokens > 0
                texts = [*texts, request.sequences[0].tokens.tolist()][-12:]
    seen["preempted"] = engine.scheduler.num_preemptions
    assert_no_page_is_lost(engine)
    return seen


def serve(
    engine: Engine,
    rng: random.Random,
    num_requests: int,
    is_right: Callable[[list[int], list[int], int], bool],
    vocab: int,
    ignore_eos: bool = True,
    arrivals: float = 0.06,
) -> Counter[str]:
    """Random requests, many of which go on from earlier ones; each answer is to be right."""

    def ask(texts: list[list[int]]) -> Asked:
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
        if texts and rng.random() < 0.8:
            base = rng.choice(texts)
            cut = len(base) if rng.random() < 0.5 else rng.randint(1, len(base))
            prompt = (base[:cut] + prompt[: rng.randint(0 if cut > 1 else 1, 20)])[:120]
        count, n = rng.choice([rng.randint(1, 12), 30]), rng.choice([1, 1, 3])
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=ignore_eos, n=n)
        return prompt, params, None

    def verify(request: Request) -> None:
        prompt, count = request.prompt_token_ids.tolist(), request.params.max_tokens or 0
        for tokens in generated([request])[0]:
            assert is_right(prompt, tokens, count), (prompt, tokens)
            assert len(tokens) == count or not ignore_eos

    seen = play(engine, rng, num_requests, ask, verify, arrivals=arrivals, failures=0.04)
    assert isinstance(engine.scheduler.planner, SavedStatePlanner)
    seen["evicted"] = engine.scheduler.planner.index.num_evicted
    return seen
