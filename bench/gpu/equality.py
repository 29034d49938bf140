"""Checks the engine's greedy tokens on a GPU, with and without a cache, against transformers'.

Kernels that add in another order may choose another token where two are nearly tied in bfloat16. So
a float32 copy of the model, in plain transformers, judges every token in its context: it must be
the best one, or tied with the best; anything else is a FAIL.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from radixcache import HashBlockCache, NoCache, RadixCache
from radixcache.base import Tokens
from radixcache.bench.gpu.models import Cache, engine_on, generated, random_llama, run_all
from radixcache.bench.gpu.place import Place, Sizes
from radixcache.bench.gpu.report import Report
from radixcache.runtime.engine import model_runner

NEAR = 5e-2
"""Two logits closer than this share of their row's range are a tie in bfloat16; a wrong page moves
them by several times that."""

CACHES: dict[str, tuple[Cache, int]] = {
    "radix, page 16": (RadixCache, 16),
    "radix, page 1": (RadixCache, 1),
    "hash-block 16": (HashBlockCache, 16),
    "no cache, page 16": (NoCache, 16),
}


def run(place: Place, report: Report) -> None:
    prompts = make_prompts(place.sizes)
    model = random_llama(place, place.sizes.small)
    judge = Judge(copy.deepcopy(model).float(), NEAR)
    for name, (cache, page_size) in CACHES.items():
        name = f"{name} = plain transformers"
        report.check(name, compare, place, model, judge, prompts, cache, page_size)


def make_prompts(sizes: Sizes) -> list[Tokens]:
    """Seven prompts share a stem long enough for a cascade; three branch off in mid-page."""
    rng = np.random.default_rng(11)

    def tokens(count: int) -> Tokens:
        return rng.integers(0, sizes.small["vocab_size"], count).astype(np.int32)

    stem, branch = tokens(sizes.stem), tokens(sizes.stem // 19)
    prompts = [np.concatenate([stem, tokens(3 + 5 * i)]) for i in range(7)]
    prompts += [np.concatenate([stem[: len(stem) // 2], branch, tokens(4 + i)]) for i in range(3)]
    return [*prompts, tokens(2), tokens(40)]


class Judge:
    """Judges answers by plain transformers in float32.

    Args:
        near: the share of their row's range by which two tied logits may differ.
    """

    def __init__(self, model: PreTrainedModel, near: float) -> None:
        if model._supports_sdpa:
            model.set_attn_implementation("sdpa")
        self._model, self.near = model, near
        self._known: dict[bytes, torch.Tensor] = {}  # the same answers come repeatedly

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int] | Tokens, answer: list[int]) -> torch.Tensor:
        """Logits [len(answer), vocabulary] from which each token of the answer should be chosen."""
        ids = torch.tensor([[*map(int, prompt), *answer]])
        key = ids.numpy().tobytes()
        if key not in self._known:
            ids, count = ids[:, :-1].to(self._model.device), len(answer)
            found = self._model(input_ids=ids, use_cache=False, logits_to_keep=count)
            self._known[key] = found.logits[0].cpu()
        return self._known[key]

    @torch.inference_mode()
    def worst_choice(self, model: PreTrainedModel, prompts: Sequence[Tokens]) -> float:
        """The largest gap to the best logit here, over all tokens of the prompts, of the greedy
        choices of `model` (transformers in another dtype)."""
        worst = 0.0
        for prompt in prompts:
            ids = torch.from_numpy(prompt)[None].long().to(self._model.device)
            found, rough = (
                m(input_ids=ids, use_cache=False).logits[0] for m in (self._model, model)
            )
            worst = max(worst, float(_gaps(found, rough.argmax(-1)).max()))
        return worst

    def __call__(self, prompts: Iterable[Sequence[int] | Tokens], answers: list[list[int]]) -> str:
        """Says how many tokens are the best; AssertionError if one is neither best nor tied."""
        own = count = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            found = self.logits(prompt, answer)
            gaps = _gaps(found, torch.tensor(answer))
            worst = float(gaps.max())
            assert worst <= self.near, (
                f"after a prompt of {len(prompt)}, a token's logit is {worst:.2%} of the range "
                f"below the best one's: {answer}"
            )
            own, count = own + int((gaps == 0).sum()), count + len(answer)
        ties = f", {count - own} tied" if own < count else ""
        return f"{own} of {count} tokens{ties}"


def _gaps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[T] how far each token's logit is below the best of its row, in shares of the row's range."""
    best, chosen = logits.max(-1).values, logits.gather(-1, tokens[:, None])[:, 0]
    return (best - chosen) / (best - logits.min(-1).values)


def compare(
    place: Place, model: PreTrainedModel, judge: Judge, prompts: list[Tokens],
    cache: Cache = RadixCache, page_size: int = 16, windows: bool = False,
) -> str:  # fmt: skip
    """Run all prompts at once, then again, now cached; says what the judge finds."""
    total = sum(len(prompt) + place.sizes.answer for prompt in prompts)
    parts = []
    # Lowered, as so small a model would never share enough bytes for a cascade.
    with patch.object(model_runner, "MIN_SAVED", 0), engine_on(
        place, model, num_tokens=2 * total, cache=cache, page_size=page_size,
        max_num_batched_tokens=512, max_num_seqs=16, windows=windows,
    ) as engine:  # fmt: skip
        for turn in ("cold", "warm"):
            found = generated(run_all(engine, prompts, place.sizes.answer))
            parts.append(f"{turn} {judge(prompts, found)}")
            engine.cache.check()
        shapes = [*engine.runner.graphs._replays] if engine.runner.graphs else []
        graphs = [shape.cascade for shape in shapes]
        prefills = [shape for shape in shapes if not shape.only_decodes]
        copies = engine.cache.stats.copied_pages
        shares = cache is not NoCache and engine.model.attention.reads_shared_once
    if place.with_flashinfer:
        assert graphs, "no step ran in a graph"
        assert any(graphs) or not shares, "no step shared a prefix in two levels"
        assert prefills, "no step with prefill ran in a graph"
    assert copies or cache is not RadixCache or page_size == 1, "no page was copied"
    return ", ".join([*parts, f"{copies} copies", f"{len(graphs)} graphs"])
