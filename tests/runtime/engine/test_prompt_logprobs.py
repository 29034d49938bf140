"""Log-probabilities of prompt tokens: those of plain transformers, each computed once."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache import InvalidRequest, SamplingParams
from radixcache.runtime.request import Request
from radixcache.runtime.sampling import prompt_logprobs
from tests.helpers.cover import covering
from tests.helpers.engines import (
    assert_no_page_is_lost,
    finish,
    generated,
    make_engine,
    plain_greedy,
    plain_model,
    prompts,
    run,
)
from tests.helpers.models import VOCAB_SIZE, tiny_model

SEED = 20_261_121
NEW_TOKENS = 5
TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


def scoring(count: int = 3, **options: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": NEW_TOKENS, **options}
    return SamplingParams(prompt_logprobs=count, **settings)


ONLY_SCORE = scoring(max_tokens=0)


def text(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(250) for _ in range(length)]


@cache
@torch.inference_mode()
def plain_logprobs(path: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """[T, vocab] of each position by plain transformers, computed in float64."""
    logits = plain_model(path)(torch.tensor([prompt])).logits[0]
    return logits.double().log_softmax(-1)


def assert_scored(path: Path, request: Request) -> None:
    """The request's prompt log-probabilities are those of plain transformers."""
    prompt, count = request.prompt_token_ids.tolist(), request.params.prompt_logprobs
    assert count is not None
    got = request.output().prompt_logprobs
    assert got is not None and len(got) == len(prompt)
    assert got[0] is None
    rows = plain_logprobs(path, tuple(prompt))
    for token, entry, row in zip(prompt[1:], got[1:], rows, strict=False):
        assert entry is not None
        own, *likeliest = entry
        assert own == token
        assert all(abs(value - row[at]) < TOLERANCE for at, value in entry.items())
        if count:
            threshold = row.topk(count).values[-1]
            assert len(entry) == count + (token not in sorted(entry, key=entry.get)[-count:])  # type: ignore[arg-type]
            assert all(row[at] > threshold - TOLERANCE for at in likeliest)
        else:
            assert not likeliest


@covering(
    family=["llama", "gemma3_text"],
    page_size=[1, 4, 16],
    chunk=[8, 64],
    mode=["radix", "hash-block", "none"],
)
def test_scores_equal_plain_transformers_cold_and_warm_among_other_requests(
    tmp_path: Path, family: str, page_size: int, chunk: int, mode: str
) -> None:
    path = tiny_model(family, tmp_path / family, seed=SEED)
    engine = make_engine(path, mode, page_size, max_num_batched_tokens=chunk)
    for _ in range(2):
        requests = [
            engine.add_request(prompt, params)
            for i, prompt in enumerate(prompts())
            for params in (scoring(i), GREEDY)
        ]
        finish(engine)
        for request in requests:
            wanted = plain_greedy(path, request.prompt_token_ids.tolist(), NEW_TOKENS)
            assert generated([request])[0][0] == wanted
            if request.params is GREEDY:
                assert request.output().prompt_logprobs is None
            else:
                assert_scored(path, request)
    if mode != "none":
        assert all(
            request.output().num_cached_tokens > 0
            for request in requests
            if len(request.prompt_token_ids) > page_size + 1
        )
    assert_no_page_is_lost(engine)


def test_what_was_scored_is_computed_once(path: Path) -> None:
    prompt = prompts()[0]
    engine = make_engine(path, page_size=1)
    first, again, longer = (
        *run(engine, [prompt, prompt], ONLY_SCORE, concurrent=False),
        *run(engine, [prompt + text(9, random.Random(SEED))], ONLY_SCORE),
    )
    assert first.prefilled_tokens == len(prompt)
    assert again.prefilled_tokens == 0  # its logits are kept, too
    assert longer.prefilled_tokens == 1 + 9
    for request in (first, again, longer):
        assert_scored(path, request)


def test_cached_tokens_without_scores_are_computed_again_and_count_as_no_hit(path: Path) -> None:
    prompt = prompts()[0]
    engine = make_engine(path, page_size=4)
    pages = engine.cache.pool.num_pages
    run(engine, [prompt], scoring(max_tokens=0, n=1))
    run(engine, [prompt], GREEDY)
    longer = prompt + text(20, random.Random(SEED))
    run(engine, [longer], GREEDY)
    used = pages - engine.cache.pool.num_free
    stats = engine.cache.stats
    before, hits = stats.query_tokens, stats.hit_tokens
    (request,) = run(engine, [longer], ONLY_SCORE)
    assert_scored(path, request)
    start = len(prompt) - 1
    assert request.prefilled_tokens == len(longer) - start
    assert request.output().num_cached_tokens == start
    assert (stats.query_tokens - before, stats.hit_tokens - hits) == (len(longer), start)
    assert pages - engine.cache.pool.num_free == used  # computed in place


def test_scores_are_shared_within_a_namespace_only(path: Path) -> None:
    engine = make_engine(path, page_size=1)
    prompt = prompts()[0]
    for namespace in ("a", "b", None):
        engine.add_request(prompt, GREEDY, namespace=namespace)
        finish(engine)  # its KV is cached: only the scores of others could spare the rest
        request = engine.add_request(prompt, ONLY_SCORE, namespace=namespace)
        finish(engine)
        assert request.prefilled_tokens == len(prompt)
        assert_scored(path, request)


@pytest.mark.parametrize("mode", ["radix", "hash-block", "none"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 17])
def test_max_tokens_0_ends_with_the_prompt(path: Path, mode: str, length: int) -> None:
    prompt = text(length, random.Random(SEED))
    num_pages = -(-length // 4) + 1 + (mode == "hash-block")  # one is spare, page 0 is not used
    engine = make_engine(path, mode, 4, num_pages, max_num_batched_tokens=8)
    for _ in range(2):
        (request,) = run(engine, [prompt], ONLY_SCORE)
        assert_scored(path, request)
        output = request.output()
        assert output.finished and output.error is None
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
        assert output.metrics.ttft is None
        assert output.metrics.latency == request.output().metrics.latency  # its time is over
    if mode != "none":
        assert engine.cache.match([*prompt, 0]) == (length if mode == "radix" else length // 4 * 4)
    assert_no_page_is_lost(engine)


def test_max_tokens_0_takes_a_prompt_as_long_as_the_context(path: Path) -> None:
    engine = make_engine(path)
    whole = text(engine.model.max_context, random.Random(SEED))
    (request,) = run(engine, [whole], ONLY_SCORE)
    assert_scored(path, request)
    with pytest.raises(InvalidRequest, match="513 tokens are more"):
        engine.add_request([*whole, 1], ONLY_SCORE)
    with pytest.raises(InvalidRequest, match="leave no room"):
        engine.add_request(whole, scoring(max_tokens=1))


def test_a_step_computes_logits_for_no_more_prompt_tokens_than_memory_allows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 10 * 4 * VOCAB_SIZE)
    monkeypatch.setattr(prompt_logprobs, "_SLICE_BYTES", 3 * 4 * VOCAB_SIZE)
    engine = make_engine(path, page_size=4, max_num_batched_tokens=64)
    most = longest = 0
    forward = engine.model.forward

    def spy(tokens: Any, batch: Any, rows: Any, *rest: Any) -> torch.Tensor:
        nonlocal most, longest
        most, longest = max(most, len(rows)), max(longest, len(tokens))
        assert batch.query_lens.min() > 0
        return forward(tokens, batch, rows, *rest)

    monkeypatch.setattr(engine.model, "forward", spy)
    for request in run(engine, prompts(), ONLY_SCORE):
        assert_scored(path, request)
    assert most == 10
    assert longest == 10
    run(engine, [text(200, random.Random(SEED))], GREEDY)
    assert longest == 64  # the others are not held back
