"""Steps that are launched before the tokens of the step before are read, as on a GPU.

On a CPU a launch computes at once, so that all but the timing is the same. That the tokens are the
same, too, is in test_engine.py, test_logits_cache.py and test_logits_processors.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixcache import SamplingParams
from radixcache.runtime.engine.engine import Engine
from tests.helpers import engines
from tests.helpers.engines import assert_no_page_is_lost, finish


def make_quick_engine(path: Path, monkeypatch, **options) -> Engine:
    """An engine whose model says token 7 at once, whatever it is given."""
    engine = engines.make_engine(path, **options)
    engine._runs_ahead = True
    logits = torch.zeros(64, engine.model.vocab_size).index_fill_(1, torch.tensor([7]), 1.0)
    monkeypatch.setattr(
        engine.model, "forward", lambda tokens, batch, rows, pool: logits[: len(rows)]
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
