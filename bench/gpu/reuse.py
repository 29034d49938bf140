"""The same requests with a radix tree, in hash-block mode, without a cache, and by transformers.

Conversations about a few documents whose lengths are no multiples of a block, each with a question
of its own, and then a second turn that goes on from the first one's answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedModel

from bench.gpu.models import Cache, engine_on, free_memory, generated, run_all
from bench.gpu.place import Place
from bench.gpu.report import Figure, NotRun, Report
from radixcache import HashBlockCache, NoCache, RadixCache
from radixcache.base import Tokens

CACHES: dict[str, tuple[Cache, int]] = {
    "radix, page 16": (RadixCache, 16),
    "radix, page 1": (RadixCache, 1),
    "hash-block 16": (HashBlockCache, 16),
    "no cache": (NoCache, 16),
}


def run(place: Place, report: Report, model: PreTrainedModel) -> None:
    for name, (cache, page_size) in CACHES.items():
        report.measure(name, partial(_ours, place, model, name, cache, page_size))
    report.measure("transformers' generate_batch", partial(_peer, place, model))


def _requests(place: Place, vocab: int) -> tuple[list[Tokens], list[Tokens]]:
    """First prompts, and what is asked in the second turn."""
    sizes, rng = place.sizes, np.random.default_rng(17)

    def tokens(low: int, high: int) -> Tokens:
        return rng.integers(0, vocab, int(rng.integers(low, high))).astype(np.int32)

    documents = [tokens(*sizes.document) for _ in range(sizes.documents)]
    first = [
        np.concatenate([documents[i % sizes.documents], tokens(5, 40)])
        for i in range(sizes.requests)
    ]
    return first, [tokens(5, 40) for _ in first]


def _ours(
    place: Place, model: PreTrainedModel, name: str, cache: Cache, page_size: int
) -> Iterator[Figure]:
    sizes = place.sizes
    first, more = _requests(place, sizes.big["vocab_size"])
    num_tokens = sum(len(prompt) + 2 * sizes.answer + 64 for prompt in first) * 2
    with engine_on(
        place, model, num_tokens=num_tokens, cache=cache, page_size=page_size,
        max_num_batched_tokens=sizes.chunk, max_num_seqs=sizes.requests,
    ) as engine:  # fmt: skip
        # Once before: kernels and graphs of all the sizes.
        run_all(engine, first, sizes.answer)
        engine.cache.reset()
        start, prefilled = time.perf_counter(), 0
        requests = run_all(engine, first, sizes.answer)
        prefilled += sum(request.prefilled_tokens for request in requests)
        answers = [np.array(answer, np.int32) for answer in generated(requests)]
        second = [np.concatenate(parts) for parts in zip(first, answers, more, strict=True)]
        requests = run_all(engine, second, sizes.answer)
        prefilled += sum(request.prefilled_tokens for request in requests)
        seconds = time.perf_counter() - start
    asked = sum(len(prompt) for prompt in [*first, *second])
    yield Figure(
        f"{name}: two turns of {len(first)} requests", seconds * 1e3, "ms",
        note=f"prefilled {prefilled} of {asked} prompt tokens",
    )  # fmt: skip


def _peer(place: Place, model: PreTrainedModel) -> Iterator[Figure]:
    """transformers' own continuous batching; two calls, so its cache starts empty in each."""
    sizes = place.sizes
    free_memory(place)
    first, more = _requests(place, sizes.big["vocab_size"])
    before = model.config._attn_implementation
    config = GenerationConfig(max_new_tokens=sizes.answer, do_sample=False, eos_token_id=-1)
    config.pad_token_id = 0
    options: dict[str, Any] = {}
    try:
        from transformers import ContinuousBatchingConfig

        model.set_attn_implementation("sdpa")
        tokens = sum(len(prompt) + 2 * sizes.answer + 64 for prompt in first) * 2
        settings: dict[str, Any] = {
            "num_blocks": tokens // 256 + 2 * sizes.requests,
            "max_batch_tokens": sizes.chunk,
        }
        if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__:
            settings["auto_switch_to_flash"] = False  # it would fetch a kernel
        options["continuous_batching_config"] = ContinuousBatchingConfig(**settings)

        def batch(prompts: list[Tokens]) -> tuple[float, list[list[int]]]:
            start = time.perf_counter()
            generate: Any = model.generate_batch
            found = generate(
                [prompt.tolist() for prompt in prompts], generation_config=config, **options
            )
            taken = time.perf_counter() - start
            answers = [result.generated_tokens for result in found.values()]
            if len(answers) != len(prompts) or not all(answers):
                raise NotRun(f"it answered {sum(map(bool, answers))} of {len(prompts)} prompts")
            return taken, answers

        batch(first[:2])
        one, answers = batch(first)
        second = [
            np.concatenate([prompt, np.array(answer, np.int32), rest])
            for prompt, answer, rest in zip(first, answers, more, strict=True)
        ]
        two, _ = batch(second)
    except NotRun:
        raise
    except Exception as error:  # whatever it cannot do here
        raise NotRun(f"{type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(before)
        free_memory(place)
    yield Figure(
        f"transformers {_version()} generate_batch: two turns of {len(first)} requests",
        (one + two) * 1e3,
        "ms",
        note="sdpa attention; its start-up is in the time, twice",
    )


def _version() -> str:
    import transformers

    return transformers.__version__
