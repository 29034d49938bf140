"""Several steps in one native call give the bits of one call a step."""

from __future__ import annotations

import copy
from ctypes import c_int32
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.draw import GREEDY, Draw, MultiStep
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.selfcheck import PagedTexts
from tests.helpers.multi_step import decode_by_steps
from tests.helpers.native import needs_kernels
from tests.runtime.model.exact_schedules import differing, exact_model

pytestmark = needs_kernels

LENS, STEPS = (1, 9, 30), 6
FAMILIES = ("llama", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_moe", "mistral4")


class Decodes:
    """Three texts of random tokens, all computed but for the last, and what decodes them."""

    def __init__(self, model: PagedModel) -> None:
        rng = np.random.default_rng(1)
        texts = [rng.integers(model.vocab_size, size=n + STEPS).tolist() for n in LENS]
        paged = PagedTexts(model, texts, 4)
        paged.run({at: n - 1 for at, n in enumerate(LENS) if n > 1})
        self.model, self.pool, count = model, paged.pool, len(LENS)
        self.batch = PagedBatch.of(paged.tables, [STEPS] * count, [n + STEPS - 1 for n in LENS], 4)
        self.ids = np.concatenate(
            [text[n - 1 : n - 1 + STEPS] for text, n in zip(texts, LENS, strict=True)]
        )
        uniform = rng.random((count, STEPS))
        self.draws = [
            GREEDY if s == 1 else Draw(0.9 if s else 1.0, uniform[s, i], 0.8, 0.0, 20 * (s == 2))
            for s, i in product(range(count), range(STEPS))
        ]

    def run(self, by: Any, stops: Any = (), interrupt: int = 0) -> list[torch.Tensor]:
        """The tokens, the highest logits, and the pages behind them."""
        how = MultiStep(self.draws, [*stops], c_int32(interrupt))
        pool = copy.deepcopy(self.pool)
        found = by(self.ids, self.batch, self.batch.positions, pool, how)
        return [*found, *(side for layer in pool.layers for side in layer)]


def by_steps(model: PagedModel) -> Any:
    return lambda *step: decode_by_steps(model, *step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_logits_and_pages_have_the_bits_of_single_steps(family, dtype) -> None:
    model = exact_model(family, dtype)
    decodes = Decodes(model)
    found, wanted = decodes.run(model.decode), decodes.run(by_steps(model))
    assert found[0].tolist() == wanted[0].tolist() and found[0].shape == (len(LENS), STEPS)
    assert not any(map(differing, found[1:], wanted[1:]))


def test_no_step_follows_a_stop_an_interrupt_or_logits_that_are_no_numbers() -> None:
    model = exact_model("llama", "float32")
    decodes = Decodes(model)
    tokens, *_ = decodes.run(model.decode)
    stop = tokens[2, 3].item()
    first = min(row.index(stop) for row in tokens.tolist() if stop in row)
    for how, steps in (({"stops": [stop]}, first + 1), ({"interrupt": 1}, 1)):
        found, wanted = decodes.run(model.decode, **how), decodes.run(by_steps(model), **how)
        assert found[0].tolist() == wanted[0].tolist() == tokens[:, :steps].tolist()
        assert not any(map(differing, found[1:], wanted[1:]))
    decodes.pool.layers[0].k[decodes.batch.kv_indices[-STEPS]] = torch.nan
    found = decodes.run(model.decode)
    assert found[1].isfinite().tolist() == [[True], [True], [False]]


def test_what_does_not_fit_together_is_refused() -> None:
    model = exact_model("llama", "float32")
    decodes = Decodes(model)
    decodes.ids[STEPS] = model.vocab_size
    with pytest.raises(IndexError, match="does not exist"):
        decodes.run(model.decode)
    decodes.draws.pop()
    with pytest.raises(ValueError, match="no decodes of one length"):
        decodes.run(model.decode)
    assert not exact_model("qwen3_5_text", "float32").multi_step


def test_windows_of_other_sequences_are_refused() -> None:
    model = exact_model("gemma3_text", "float32")
    decodes = Decodes(model)
    tables = np.split(decodes.batch.kv_indices, decodes.batch.kv_indptr[1:-1])
    for of, lens in (((0, 1, 2), [5, 7, 6]), ((1, 2), [9, 9]), ((2,) * 18, [1] * 18)):
        kv_lens = decodes.batch.kv_lens[list(of)].tolist()
        window = PagedBatch.of([tables[i] for i in of], lens, kv_lens, 4)
        with pytest.raises(ValueError, match="no decodes of one length"):
            decodes.run(partial(decode_with, model, window))


def decode_with(model: PagedModel, window: PagedBatch, ids: Any, batch: Any, *rest: Any) -> Any:
    return model.decode(ids, replace(batch, window=window), *rest)
