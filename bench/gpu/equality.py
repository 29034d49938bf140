"""The engine's greedy tokens on the device: cache on, cache off, plain transformers.

bfloat16 kernels that add in another order may choose another token where two are nearly tied. So
where two answers part, a float32 copy of the model says how far apart the two tokens are; more than
rounding is a FAIL, and what comes after is not compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from radixcache import HashBlockCache, NoCache, PagePool, RadixCache
from radixcache.base import Tokens
from radixcache.bench.gpu.models import Cache, engine_on, generated, random_llama, run_all
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report
from radixcache.kernels.torch_backend import TorchBackend
from radixcache.runtime.engine import engine as engine_module
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduler import Scheduler
from radixcache.runtime.model.paged_model import PagedModel

NEAR = 5e-2
"""Two logits closer than this share of their row's range are a tie in bfloat16; a wrong page moves
them by several times that."""


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    rng = np.random.default_rng(11)
    vocab = sizes.small["vocab_size"]

    def tokens(count: int) -> Tokens:
        return rng.integers(0, vocab, count).astype(np.int32)

    # Seven share a long stem, enough for a cascade; three branch off in mid-page.
    stem, branch = tokens(sizes.stem), tokens(sizes.stem // 19)
    prompts = [np.concatenate([stem, tokens(3 + 5 * i)]) for i in range(7)]
    prompts += [np.concatenate([stem[: len(stem) // 2], branch, tokens(4 + i)]) for i in range(3)]
    prompts += [tokens(2), tokens(40)]

    model = random_llama(place, sizes.small)
    judge = copy.deepcopy(model).float()
    judge.set_attn_implementation("sdpa")
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    expected: list[list[int]] = []

    def by_transformers() -> str:
        expected.extend(_generate(plain, prompt, sizes.answer) for prompt in prompts)
        return f"{len(prompts)} prompts, {sizes.answer} tokens each"

    report.check("plain transformers generates", by_transformers)
    if not expected:
        return
    caches: list[tuple[str, Cache, int]] = [
        ("radix, page 16", RadixCache, 16),
        ("radix, page 1", RadixCache, 1),
        ("hash-block 16", HashBlockCache, 16),
        ("no cache, page 16", NoCache, 16),
        ("no cache, page 1", NoCache, 1),
    ]
    for name, cache, page_size in caches:
        work = partial(_ours, place, model, judge, prompts, expected, cache, page_size)
        report.check(f"{name} = plain transformers", work)
    report.check(
        "float32 over plain torch = plain transformers in float32",
        partial(_float32, place, judge, prompts),
    )


def _ours(
    place: Place,
    model: PreTrainedModel,
    judge: PreTrainedModel,
    prompts: list[Tokens],
    expected: list[list[int]],
    cache: Cache,
    page_size: int,
) -> str:
    """All prompts at once, then all again, now cached."""
    seen = {"copies": 0, "graphs": 0, "cascades": 0}
    total = sum(len(prompt) + place.sizes.answer for prompt in prompts)
    with engine_on(
        place, model, num_tokens=2 * total, cache=cache, page_size=page_size,
        max_num_batched_tokens=512, max_num_seqs=16,
    ) as engine:  # fmt: skip
        with _counting(engine, seen):
            told = []
            for turn in ("cold", "warm"):
                found = generated(run_all(engine, prompts, place.sizes.answer))
                told.append(f"{turn} {_compare(judge, prompts, found, expected)}")
                engine.cache.check()
        if place.planted:
            found[0][0] = (found[0][0] + 1) % place.sizes.small["vocab_size"]
            _compare(judge, prompts, found, expected)
    assert seen["graphs"], "no step ran in a graph"
    assert seen["cascades"] or cache is NoCache, "no step shared a prefix in two levels"
    assert seen["copies"] or cache is not RadixCache or page_size == 1, "no page was copied"
    return ", ".join([*told, *(f"{count} {name}" for name, count in seen.items())])


@contextmanager
def _counting(engine: Engine, seen: dict[str, int]) -> Iterator[None]:
    """Counts from outside what an engine does."""

    def counted(
        name: str, work: Callable[..., Any], count: Callable[..., int]
    ) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = work(*args)
            seen[name] += count(result, *args)
            return result

        return call

    graphs, group = engine._graphs, vars(engine_module)["group_by_prefix"]
    assert graphs is not None, "the backend has no graphs"
    copied = counted("copies", engine.kv_pool.copy, lambda _, copies: len(copies))
    replayed = counted("graphs", graphs.run, lambda logits, *_: logits is not None)
    grouped = counted("cascades", group, lambda found, *_: bool(found[1]))
    with (
        patch.object(engine.kv_pool, "copy", copied),
        patch.object(graphs, "run", replayed),
        patch.object(engine_module, "group_by_prefix", grouped),
    ):
        yield


def _float32(place: Place, judge: PreTrainedModel, prompts: list[Tokens]) -> str:
    count = place.sizes.answer
    prompts = prompts[-4:]
    expected = [_generate(judge, prompt, count) for prompt in prompts]
    paged = PagedModel(copy.deepcopy(judge), TorchBackend(place.device))
    cache = RadixCache(PagePool(1024, 16))
    engine = Engine(paged, paged.allocate(1024, 16), cache, Scheduler(cache, 512, 16))
    found = generated(run_all(engine, prompts, count))
    return _compare(judge, prompts, found, expected)


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompt: Tokens, count: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


def _compare(
    judge: PreTrainedModel, prompts: list[Tokens], found: list[list[int]], right: list[list[int]]
) -> str:
    equal = ties = 0
    for prompt, ours, theirs in zip(prompts, found, right, strict=True):
        assert len(ours) == len(theirs), f"{len(ours)} tokens, {len(theirs)} expected"
        if ours == theirs:
            equal += 1
            continue
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        gap = _gap(judge, np.concatenate([prompt, ours[:at]]), ours[at], theirs[at])
        assert gap <= NEAR, (
            f"token {at} after a prompt of {len(prompt)} is {ours[at]}, not {theirs[at]}, "
            f"whose logit is {gap:.1%} of the range higher"
        )
        ties += 1
    return f"{equal} of {len(prompts)} equal" + (f", {ties} parted at a tie" if ties else "")


@torch.inference_mode()
def _gap(judge: PreTrainedModel, tokens: Tokens, ours: int, theirs: int) -> float:
    """How far two tokens' logits are apart, in shares of the range of all."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(judge.device)
    logits = judge(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return float((logits[theirs] - logits[ours]).abs() / (logits.max() - logits.min()))
