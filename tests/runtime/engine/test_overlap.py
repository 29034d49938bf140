"""Steps that are launched before the tokens of the step before are read, as on a GPU.

On a CPU a launch computes at once, so that all but the timing is the same. That the tokens are the
same, too, is in test_engine.py, test_logits_cache.py and test_logits_processors.py.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache import SamplingParams
from radixcache.runtime.engine.engine import Engine
from tests.helpers import engines
from tests.helpers.cover import seeds
from tests.helpers.drafts import speculate
from tests.helpers.engines import CACHES, assert_no_page_is_lost, finish
from tests.helpers.hash_model import (
    VOCAB,
    HashModel,
    RecurrentHashModel,
    assert_cached_is_computed,
    greedy,
    hash_engine,
)
from tests.helpers.simulated_cuda import CUDA, simulated_cuda


def make_quick_engine(path: Path, monkeypatch, **options) -> Engine:
    """An engine whose model says token 7 at once, whatever it is given."""
    engine = engines.make_engine(path, **options)
    engine.overlap = True
    logits = torch.zeros(64, engine.model.vocab_size).index_fill_(1, torch.tensor([7]), 1.0)
    monkeypatch.setattr(
        engine.model, "forward", lambda tokens, batch, rows, *_: logits[: len(rows)]
    )
    return engine


def share_that_ran_ahead(engine: Engine) -> float:
    """Of the steps until all is done, how many were launched before the step before was read."""
    ahead, steps = 0, 0
    while engine.has_work:
        ahead += engine._ahead is not None
        steps += 1
        engine.step()
    return ahead / steps


@pytest.mark.parametrize("cache", ["radix", "hash-block", "none"])
def test_sequences_of_unequal_lengths_keep_running_ahead(path, monkeypatch, cache) -> None:
    """Each comes to the end of what is reserved for it at another step than the others."""
    engine = make_quick_engine(path, monkeypatch, cache=cache, num_pages=2048)
    for i in range(64):
        params = SamplingParams(temperature=0, max_tokens=240 + i % 5, ignore_eos=True)
        engine.add_request([i, *range(3 * i)], params)
    engine.step()  # most of the prompts
    assert share_that_ran_ahead(engine) >= 0.95
    assert_no_page_is_lost(engine)


def test_a_request_that_waits_for_pages_does_not_stop_the_others(path, monkeypatch) -> None:
    engine = make_quick_engine(path, monkeypatch, page_size=4, num_pages=50)
    long, short = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (120, 20))
    first = engine.add_request([1, 2, 3], long)
    engine.step()
    second = engine.add_request([*range(100, 200)], short)
    for _ in range(3):  # of which one tries to admit it
        engine.step()
    while not first.finished:
        assert engine._ahead is not None and not second.sequences[0].lease
        engine.step()
    finish(engine)
    assert second.sequences[0].finish_reason == "length"
    assert_no_page_is_lost(engine)


def test_out_of_pages_ahead_ends_the_run_ahead_and_puts_the_newest_back(path, monkeypatch) -> None:
    engine = make_quick_engine(path, monkeypatch, page_size=4, num_pages=40)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    requests = [engine.add_request([i, i + 1], params) for i in range(3)]
    share_that_ran_ahead(engine)
    assert [len(r.sequences[0].generated) for r in requests] == [100] * 3
    assert not requests[0].sequences[0].preemptions and requests[2].sequences[0].preemptions
    assert_no_page_is_lost(engine)


@pytest.mark.parametrize("cache", CACHES)
def test_a_token_that_never_came_is_not_cached(cache) -> None:
    """The step that fails was launched, and one behind it, which counts the token of the first."""
    engine = hash_engine(cache)
    engine.overlap = True
    params = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1, max_tokens=9)
    prompt = [*range(20), *range(20)]
    request = engine.add_request(prompt, params)
    engine.step()
    assert request.error and not len(request.sequences[0].generated)
    assert engine._ahead is not None
    for token in range(VOCAB):
        assert engine.cache.cached_length([*prompt, token]) <= len(prompt)
    assert_cached_is_computed(engine)
    finish(engine)


class DeviceHashModel(HashModel):
    """On a simulated GPU, which knows the tokens of the step before and sees the logits first."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.fails_at = CUDA, 17

    def forward(self, *step: Any) -> Any:
        return super().forward(*step).to(CUDA)


class DeviceRecurrentModel(DeviceHashModel, RecurrentHashModel):
    """The same with states: one of a token too many, or of one that never came, is a wrong one."""


def fuzz(seed: int, num_requests: int, recurrent: bool = False) -> Counter[str]:
    """Requests of every kind on a simulated GPU, of which a tenth fail; each cached slot is
    compared with its path after each failure, and every answer with the model's."""
    rng, seen = random.Random(seed), Counter[str]()
    with simulated_cuda():
        model: Any = DeviceRecurrentModel() if recurrent else DeviceHashModel()
        page_size = rng.choice([1, 2, 4, 16])
        num_pages = rng.choice([90, 300]) // page_size + 4
        kind, running = rng.choice(["radix", "radix", "hash-block", "none"]), rng.choice([2, 12])
        states = (running + rng.choice([1, running, 60])) * recurrent
        engine = hash_engine(
            kind, page_size, num_pages, rng.choice([9, 60, 200]), running, states, model
        )
        assert engine.overlap
        if rng.random() < 0.3 and not recurrent:
            speculate(engine, 400)
        texts, live = [[0, 1, 2]], list[Any]()
        while seen["asked"] < num_requests or live:
            if seen["asked"] < num_requests and rng.random() < 0.4:
                stem = rng.choice(texts)
                cut = rng.choice([rng.randrange(len(stem) + 1), len(stem)])
                prompt = stem[:cut][: 60 if recurrent else 40]
                prompt = [*prompt, *rng.choices(range(VOCAB - 1), k=rng.randint(1, 6))]
                options: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice([1, 6, 25])}
                if rng.random() < 0.1:  # until that comes, nothing is left
                    options |= {"stop_token_ids": [5], "allowed_token_ids": [5], "min_tokens": 1}
                if rng.random() < 0.2:
                    options["n"] = 2
                live.append(engine.add_request(prompt, SamplingParams(**options)))
                seen["asked"] += 1
            if live and rng.random() < 0.02:
                engine.abort(live.pop(rng.randrange(len(live))))
            before = engine._ahead is not None
            engine.overlap = not recurrent or rng.random() < 0.7  # as where pages are short
            engine.step()
            seen["ahead"] += before
            engine.check()
            for request in [request for request in live if request.finished]:
                live.remove(request)
                prompt, params = request.prompt_token_ids.tolist(), request.params
                for sequence in request.sequences:
                    said = sequence.generated.tolist()
                    answer = greedy(prompt, params.max_tokens or 0)
                    assert params.min_tokens or said == answer[: len(said)], f"seed {seed}"
                    failed = sequence.finish_reason == "error"
                    seen["failed"] += failed
                    seen["failed ahead"] += failed and engine._ahead is not None
                    seen["hits"] += sequence.cached_tokens > 0
                    texts = [*texts, sequence.tokens.tolist()][-12:]
                if request.error or rng.random() < 0.1:
                    assert_cached_is_computed(engine)
            if not engine.has_work and rng.random() < 0.1:
                engine.reset_cache()
        assert not model.unwritten, "a slot was read before it was written"
        assert not recurrent or not model.wrong_states
        assert_no_page_is_lost(engine)
    return seen


@seeds(20_261_127, 20)
def test_states_are_of_the_tokens_that_came(seed) -> None:
    seen = Counter[str]()
    for run in range(4):
        seen += fuzz(100 * seed + run, 60, recurrent=True)
    assert seen["ahead"] > 20 and seen["failed"] > 10 and seen["failed ahead"], seen
    assert seen["hits"] > 20 or seed != 20_261_127, seen  # others may draw no cache four times


def test_an_answer_leaves_the_state_before_its_last_token_ahead_as_without() -> None:
    """A stop token may be in no later prompt; the state after it would serve none."""
    found, prompts = [], ([first, *range(19)] for first in range(VOCAB))
    prompt, answer = next((p, a) for p in prompts if len({*(a := greedy(p, 6))}) == 6)
    for overlap, max_tokens in product((False, True), (5, 20)):  # 5: none is computed ahead of it
        engine = hash_engine(num_states=8, max_num_seqs=2)
        engine.overlap = overlap
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=answer[4:5])
        engine.add_request(prompt, params)
        finish(engine)
        text = [*prompt, *answer[:4]]
        assert engine.cache.cached_length([*text, answer[4]]) >= len(text)
        again = engine.add_request([*text, (answer[4] + 1) % VOCAB], params)
        engine.step()
        found.append(again.sequences[0].cached_tokens)
        finish(engine)
        assert not engine.model.wrong_states  # type: ignore[attr-defined]
        assert engine.scheduler.planner.index.counts["running"] == 0  # type: ignore[attr-defined]
    assert found == [24] * 4


@pytest.mark.parametrize("ahead", range(5))
def test_the_state_of_a_sequence_that_fails_is_of_its_tokens(ahead) -> None:
    """So many steps run ahead, and two do not, before it fails."""
    model: Any = RecurrentHashModel()
    engine = hash_engine(num_states=8, model=model)
    engine.overlap = True
    prompt = [*range(20)]
    model.fails = lambda tokens: len(tokens) == 22 + ahead
    request = engine.add_request(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(ahead):
        engine.step()
    engine.overlap = False
    finish(engine)
    text = request.sequences[0].tokens.tolist()
    assert request.error and len(text) == 22 + ahead
    model.fails = lambda tokens: False
    engine.add_request([*text, 3], SamplingParams(temperature=0, max_tokens=4))
    finish(engine)
    assert not model.wrong_states


@seeds(20_261_127, 20)
def test_what_is_cached_was_computed_whoever_fails(seed) -> None:
    """Seeds of 60 requests each; with the exhaustive ones 5,000."""
    seen = Counter[str]()
    for run in range(4):
        seen += fuzz(100 * seed + run, 60)
    assert seen["ahead"] > 20 and seen["failed"] > 20 and seen["failed ahead"], seen
