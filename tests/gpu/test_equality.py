"""The engine's greedy tokens on a GPU, with and without a cache, against transformers'.

Kernels that add in another order may choose another token where two are nearly tied in bfloat16. So
a float32 copy of the model, in plain transformers, judges every token in its context: it must be
the best one, or tied with the best.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from radixcache import HashBlockCache, NoCache, RadixCache
from radixcache.runtime.engine import model_runner
from radixcache.tokens import Tokens
from tests.gpu.conftest import Row
from tests.gpu.models import Cache, engine_on, free_memory, random_llama, run_all
from tests.gpu.place import Place

NEAR = 5e-2
"""Two logits closer than this share of their row's range are a tie in bfloat16; a wrong page moves
them by several times that."""


@pytest.fixture(scope="module")
def model(place: Place) -> Iterator[LlamaForCausalLM]:
    yield random_llama(place, place.clear)
    free_memory()


@pytest.fixture(scope="module")
def judge(model: LlamaForCausalLM) -> Judge:
    return Judge(copy.deepcopy(model).float())


class Judge:
    """Judges answers by plain transformers in float32."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        model.set_attn_implementation("sdpa")
        self._model = model
        self._known: dict[bytes, torch.Tensor] = {}  # the same answers come repeatedly

    @torch.inference_mode()
    def logits(self, prompt: Tokens, answer: list[int]) -> torch.Tensor:
        """[len(answer), vocabulary] from which each token of the answer should be chosen."""
        ids = torch.tensor([[*map(int, prompt), *answer]])
        key = ids.numpy().tobytes()
        if key not in self._known:
            asked, count = ids[:, :-1].to(self._model.device), len(answer)
            found = self._model(input_ids=asked, use_cache=False, logits_to_keep=count)
            self._known[key] = found.logits[0].cpu()
        return self._known[key]

    def __call__(self, prompts: list[Tokens], answers: list[list[int]]) -> str:
        """Says how many tokens are the best; AssertionError if one is neither best nor tied."""
        best = count = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = self.logits(prompt, answer)
            behind = logits.max(1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            worst = float((behind / (logits.max(1).values - logits.min(1).values)).max())
            assert worst <= NEAR, f"a token's logit is {worst:.2%} of the range below the best's"
            best, count = best + int((behind == 0).sum()), count + len(answer)
        return f"{best} of {count} tokens"


def make_prompts(place: Place) -> list[Tokens]:
    """Seven prompts share a stem long enough for a cascade; three branch off in mid-page."""
    rng = np.random.default_rng(11)

    def tokens(count: int) -> Tokens:
        return rng.integers(0, place.clear["vocab_size"], count).astype(np.int32)

    stem, branch = tokens(place.short(1100, least=70)), tokens(place.short(58, least=3))
    prompts = [np.concatenate([stem, tokens(3 + 5 * i)]) for i in range(7)]
    prompts += [np.concatenate([stem[: len(stem) // 2], branch, tokens(4 + i)]) for i in range(3)]
    return [*prompts, tokens(2), tokens(40)]


@pytest.mark.parametrize(
    ("cache", "page_size"), [(RadixCache, 16), (RadixCache, 1), (HashBlockCache, 16), (NoCache, 16)]
)
def test_greedy_tokens_are_those_of_plain_transformers(
    place: Place, model: LlamaForCausalLM, judge: Judge, row: Row, cache: Cache, page_size: int
) -> None:
    """All prompts at once, then again, now cached; in graphs, with cascades and copied pages."""
    prompts, answer = make_prompts(place), place.short(24, least=3)
    total = sum(len(prompt) + answer for prompt in prompts)
    # Lowered, as so small a model would never share enough bytes for a cascade.
    with patch.object(model_runner, "MIN_SAVED", 0), engine_on(
        place, model, num_tokens=2 * total, cache=cache, page_size=page_size,
        max_num_batched_tokens=512, max_num_seqs=16,
    ) as engine:  # fmt: skip
        found = []
        for turn in ("cold", "warm"):
            requests = run_all(engine, prompts, answer)
            answers = [request.sequences[0].generated.tolist() for request in requests]
            found.append(f"{turn} {judge(prompts, answers)}")
            engine.cache.check()
        graphs = [*engine.runner.graphs._replays] if engine.runner.graphs else []
        shares = cache is not NoCache and engine.model.attention.reads_shared_once
        copies = engine.cache.stats.copied_pages
    if place.problem is None:
        assert any(not shape.only_decodes for shape in graphs), "no prefill ran in a graph"
        assert any(shape.cascade for shape in graphs) == shares, "no step was a cascade"
    assert bool(copies) == (cache is RadixCache and page_size > 1)
    row(f"best of plain transformers, {cache.__name__}, page {page_size}", ", ".join(found))


def test_another_token_is_seen(place: Place, judge: Judge) -> None:
    prompt = make_prompts(place)[0]
    logits = judge.logits(prompt, [0])[0]
    judge([prompt], [[int(logits.argmax())]])
    with pytest.raises(AssertionError, match="below the best's"):
        judge([prompt], [[int(logits.argmin())]])
