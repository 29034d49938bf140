"""A prompt that is cached to its last token computes nothing, and the answer is the same.

Most run over `HashModel`, whose next token hangs on every token before it as the pages hold them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from radixcache import SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.logits_cache import (
    PromptLogitsCache,
)
from radixcache.runtime.engine.request import Request
from tests.cover import seeds
from tests.engines import assert_no_page_is_lost, generated, run
from tests.hash_model import VOCAB, greedy, hash_engine
from tests.traffic import Asked, play

SEED = 20_261_123
TEXTS = "abcdefghijklmnopqrstuvwxyz .,"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)


def make_engine(cache: str = "radix", page_size: int = 4, **options: int) -> Engine:
    decode = lambda ids: "".join(TEXTS[i] for i in ids)  # noqa: E731
    return hash_engine(cache, page_size, decode=decode, **options)


def kept_by(engine: Engine) -> PromptLogitsCache:
    assert engine.scheduler.kept is not None
    return engine.scheduler.kept


@contextmanager
def forward_passes(engine: Engine) -> Iterator[list[int]]:
    """The number of tokens in each."""
    forward, counts = engine.model.forward, list[int]()

    def counted(token_ids: Any, *args: Any) -> torch.Tensor:
        counts.append(len(token_ids))
        return forward(token_ids, *args)

    engine.model.forward = counted  # type: ignore[method-assign, assignment]
    yield counts
    engine.model.forward = forward  # type: ignore[method-assign]


def counted(engine: Engine, prompt: list[int], params: SamplingParams, **where: Any) -> Any:
    """Of one request alone: its tokens, its forward passes, and tokens in them."""
    with forward_passes(engine) as counts:
        requests = run(engine, [prompt], params, **where)
    return generated(requests)[0], len(counts), sum(counts)


def text(length: int, seed: int = SEED) -> list[int]:
    rng = random.Random(f"{seed} {length}")
    return [rng.randrange(VOCAB - 1) for _ in range(length)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_a_prompt_that_is_sent_again_computes_nothing(page_size: int, length: int) -> None:
    engine, prompt = make_engine(page_size=page_size), text(length)
    wanted = [greedy(prompt, 5)]
    decodes = len(wanted[0]) - 1
    params = SamplingParams(temperature=0, max_tokens=5)
    assert counted(engine, prompt, params) == (wanted, 1 + decodes, length + decodes)
    hits = engine.cache.stats.hit_tokens
    for _ in range(3):
        assert counted(engine, prompt, params) == (wanted, decodes, decodes)
    (request,) = run(engine, [prompt], params)
    assert request.prefilled_tokens == 0 and request.output().num_cached_tokens == length
    assert kept_by(engine).num_used == 4
    stats = engine.cache.stats
    assert (stats.requests, stats.hit_tokens - hits) == (5, 4 * length)
    assert not engine.model.unwritten  # type: ignore[attr-defined]
    assert_no_page_is_lost(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_of_n_completions_and_of_twins_in_one_burst_one_computes(page_size: int) -> None:
    for length in (15, 16, 17):
        engine, prompt = make_engine(page_size=page_size), text(length)
        params = SamplingParams(temperature=0, n=5, max_tokens=4, ignore_eos=True)
        requests = run(engine, [prompt] * 3, params)
        assert sum(request.prefilled_tokens for request in requests) == length
        assert requests[0].output().num_cached_tokens == 0
        assert requests[1].output().num_cached_tokens == length
        assert len({tuple(tokens) for n in generated(requests) for tokens in n}) == 1
        assert_no_page_is_lost(engine)


ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 6, "logprobs": 3},
    {"temperature": 1, "seed": 7, "max_tokens": 6, "n": 3},
    {"temperature": 1, "seed": 8, "max_tokens": 6, "n": 2, "logprobs": 20},
    {"temperature": 1.7, "seed": 9, "max_tokens": 6, "top_k": 4, "top_p": 0.8},
    {"temperature": 1, "seed": 10, "max_tokens": 1, "min_p": 0.2},
    {"temperature": 1, "seed": 11, "max_tokens": 9, "stop": list("aeiou")},
    {"temperature": 1, "seed": 12, "max_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 2))},
    {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 2},
    {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 0, "logprobs": 0, "n": 2},
]


def told(request: Request) -> Any:
    """All that a request is told but times and counts."""
    output = request.output()
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs
    ], output.prompt_logprobs


@pytest.mark.parametrize("asked", ASKED, ids=[" ".join(asked) for asked in ASKED])
def test_whatever_is_asked_for_is_the_same_cold_and_from_kept_logits(asked: dict[str, Any]) -> None:
    engine, prompt, params = make_engine(), text(18), SamplingParams(**asked)
    (alone,) = run(make_engine("none"), [prompt], params)
    for turn in range(3):
        (request,) = run(engine, [prompt], params)
        assert told(request) == told(alone)
        assert request.prefilled_tokens == (0 if turn else len(prompt))
    (other,) = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=3))
    assert other.prefilled_tokens == 0


def test_logits_are_kept_within_a_namespace_only() -> None:
    engine, prompt = make_engine(), text(18)
    for turn in range(2):
        for namespace in ("blue", "red", None):
            (request,) = run(engine, [prompt], ONE, namespace=namespace)
            assert request.prefilled_tokens == (0 if turn else len(prompt))
            assert engine.match(prompt, namespace) == len(prompt)
    run(engine, [prompt + text(3)], ONE, namespace="green")  # has the KV, and nobody's logits
    assert engine.match(prompt, "green") == len(prompt) - 1
    assert counted(engine, prompt, ONE, namespace="green")[2] == 1


def test_without_its_logits_a_cached_prompt_computes_its_last_token() -> None:
    engine, prompt = make_engine(), text(18)
    kept_by(engine).num_rows = 2
    run(engine, [prompt], GREEDY)
    run(engine, [text(9)], ONE)
    run(engine, [prompt], ONE)  # used again: now the other one is the oldest
    run(engine, [text(7)], ONE)
    assert len(kept_by(engine)) == 2
    assert engine.match(text(9)) == 8 and engine.match(prompt) == 18
    assert [counted(engine, p, ONE)[2] for p in (prompt, text(9), text(7))] == [0, 1, 1]
    kept_by(engine).num_rows = 0
    run(engine, [text(5)], ONE)
    assert not len(kept_by(engine))


def test_a_flush_drops_the_logits_and_counts_on() -> None:
    engine, prompt = make_engine(), text(18)
    run(engine, [prompt, prompt], ONE)
    assert len(kept_by(engine)) == kept_by(engine).num_used == 1
    engine.reset_cache()
    assert not len(kept_by(engine)) and kept_by(engine).num_used == 1
    assert counted(engine, prompt, ONE)[2] == len(prompt)


@pytest.mark.parametrize("cache", ["hash-block", "none"])
def test_the_other_modes_keep_no_logits_and_compute_the_last_token(cache: str) -> None:
    engine, prompt = make_engine(cache, page_size=4), text(16)
    for _ in range(2):
        tokens, _, computed = counted(engine, prompt, ONE)
    assert tokens == [greedy(prompt, 1)]
    assert computed == (4 if cache == "hash-block" else 16)
    engine.reset_cache()
    assert engine.scheduler.kept is None and engine.match(prompt) == 0


@seeds(SEED, 20)
@pytest.mark.parametrize(("page_size", "ahead"), [(1, True), (4, False), (4, True), (16, True)])
def test_random_requests_aborts_and_failures_in_little_memory_lose_nothing(
    page_size: int, ahead: bool, seed: int
) -> None:
    """Each answer is that of an engine without a cache that runs the request alone."""
    rng = random.Random(seed + page_size)
    engine = make_engine(
        page_size=page_size, num_pages=100 // page_size + 4, max_num_batched_tokens=24,
        max_num_seqs=5,
    )  # fmt: skip
    kept_by(engine).num_rows = 6
    engine._runs_ahead = ahead
    stems = [text(n, seed) for n in (8, 16, 21, 33)]

    def ask(_: object) -> Asked:
        prompt = rng.choice(stems)[: rng.choice([8, 16, 16, 40])]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(3), n=rng.choice([1, 3]),
            max_tokens=rng.choice([1, 1, 4, 12]), logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            stop=rng.choice([None, None, ["a", "bc"]]), ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([None, [3, 5]]),
        )  # fmt: skip
        more = text(rng.choice([0, 0, 0, 1, 5]), rng.randrange(3))
        return prompt + more, params, rng.choice([None, "x"])

    def verify(request: Request) -> None:
        prompt = request.prompt_token_ids.tolist()
        (alone,) = run(make_engine("none"), [prompt], request.params)
        assert told(request) == told(alone), f"seed {seed}, {request.params}, {prompt}"

    play(engine, rng, 90, ask, verify, arrivals=0.3, failures=0.04)
    assert kept_by(engine).num_used > 10
    assert not engine.model.unwritten  # type: ignore[attr-defined]
    assert len(kept_by(engine)) <= 6
