"""A prompt that is cached to its last token computes nothing, and the answer is the same.

Most run over `HashModel`, whose next token hangs on every token before it as the pages hold them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from radixcache import SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.logits_cache import (
    PromptLogitsCache,
)
from radixcache.runtime.request import PromptKey
from tests.helpers.engines import assert_no_page_is_lost, generated, run
from tests.helpers.hash_model import VOCAB, greedy, hash_engine

SEED = 20_261_123
TEXTS = "abcdefghijklmnopqrstuvwxyz .,"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)


def make_engine(cache: str = "radix", page_size: int = 4, **options: Any) -> Engine:
    decode = lambda ids: "".join(TEXTS[i] for i in ids)  # noqa: E731
    return hash_engine(cache, page_size, decode=decode, **options)


def kept_by(engine: Engine) -> PromptLogitsCache:
    assert engine.scheduler.admission.logits_cache is not None
    return engine.scheduler.admission.logits_cache


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


def test_rows_are_kept_in_one_array_and_given_as_copies() -> None:
    kept = PromptLogitsCache(8, 3 * 32)
    keys = [PromptKey(np.arange(n, dtype=np.int32), None) for n in range(1, 9)]
    kept.keep(keys[0], torch.zeros(8))
    row, array = kept.use(keys[0]), kept._array
    for number, key in enumerate(keys[1:], 1):
        kept.keep(key, torch.full((8,), number))
        kept.keep(keys[1], torch.full((8,), -number))  # in place of its earlier row
    assert kept._array is array and len(kept) == 3 and not row.any()
    assert [int(kept.use(key)[0]) for key in (keys[6], keys[7], keys[1])] == [6, 7, -7]


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
    assert engine.scheduler.admission.logits_cache is None and engine.match(prompt) == 0


def test_prompts_of_one_length_and_end_are_told_apart() -> None:
    ours = np.arange(100, dtype=np.int32)
    other = ours.copy()
    other[3] = 7
    key = PromptKey(ours, "a")
    assert key == PromptKey(ours.copy(), "a") and key != PromptKey(other, "a")
    assert key != PromptKey(ours, "b") and key != PromptKey(ours[:99], "a")
    assert key in {PromptKey(ours.copy(), "a")} and key not in {PromptKey(other, "a")}


def test_a_row_that_was_cut_off_is_not_given_to_two_prompts():
    cache = PromptLogitsCache(4, 3 * 16)
    keys = [PromptKey(np.array([i], np.int32), None) for i in range(5)]
    for number in range(3):
        cache.keep(keys[number], torch.full((4,), float(number)))
    for cut_off in (keys[1], keys[3]):  # one that is there, and one that another makes room for
        with pytest.raises(RuntimeError):
            cache.keep(cut_off, torch.zeros(3))
    cache.keep(keys[4], torch.full((4,), 4.0))
    for number, key in enumerate(keys):
        assert key not in cache or cache.use(key).tolist() == [number] * 4
    cache.clear()
    cache.keep(keys[0], torch.zeros(4))
    assert cache.use(keys[0]).tolist() == [0] * 4
