"""A GPU that is not the current one, as `cuda:1` is in every thread that nobody told."""

from __future__ import annotations

import pytest
import torch

from radixcache import InvalidRequest, PagePool, RadixCache, SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.logits_cache import PromptLogitsCache
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.load import load_model
from tests.helpers.engines import generated, plain_greedy, run
from tests.kernels.gpu import simulated_gpu


def test_an_engine_runs_on_it_and_leaves_the_current_device_alone(path) -> None:
    """Events of another device wait for nothing: pinned buffers would change in flight."""
    prompts = [[1, 2, 3], [7, 8, 9, 10, 11], [5] * 20]
    expected = [[plain_greedy(path, prompt, 12)] for prompt in prompts]
    with simulated_gpu(index=1):
        model = load_model(path, device="cuda:1", dtype="float32")
        assert model.device == torch.device("cuda", 1)
        cache = RadixCache(PagePool(64, 4))
        kept = PromptLogitsCache(model.vocab_size)
        made = Engine(
            model, model.allocate(64, 4), cache, Scheduler(cache, 2048, 4, logits_cache=kept)
        )
        requests = run(made, prompts, SamplingParams(temperature=0, max_tokens=12))
        sampled = run(made, prompts, SamplingParams(seed=1, top_p=0.9, max_tokens=12))
        assert torch.cuda.current_device() == 0
        assert made.runner.graphs is not None and any(made.runner.graphs._replays.values())
    assert generated(requests) == expected
    assert all(r.finished for r in sampled)


def test_one_that_is_not_there_is_refused_in_a_sentence(path) -> None:
    with simulated_gpu(), pytest.raises(InvalidRequest, match="CUDA has 1 here"):
        load_model(path, device="cuda:1")
