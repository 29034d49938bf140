"""The same requests with a radix tree, in hash-block mode and without a cache.

Conversations about a few documents whose lengths are no multiples of a block, each with a question
of its own, and then a second turn that goes on from the first one's answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from radixcache import HashBlockCache, NoCache, RadixCache
from radixcache.base import Tokens
from radixcache.bench.gpu.models import Cache, engine_on, generated, run_all
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.request import Request

CACHES: dict[str, tuple[Cache, int]] = {
    "radix, page 16": (RadixCache, 16),
    "radix, page 1": (RadixCache, 1),
    "hash-block 16": (HashBlockCache, 16),
    "no cache": (NoCache, 16),
}


def run(place: Place, report: Report, model: PreTrainedModel) -> None:
    for name, (cache, page_size) in CACHES.items():
        report.measure(name, partial(_ours, place, model, name, cache, page_size))


def prompts_of_two_turns(place: Place, vocab: int) -> tuple[list[Tokens], list[Tokens]]:
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
    first, more = prompts_of_two_turns(place, sizes.big["vocab_size"])
    num_tokens = sum(len(prompt) + 2 * sizes.answer + 64 for prompt in first) * 2
    with engine_on(
        place, model, num_tokens=num_tokens, cache=cache, page_size=page_size,
        max_num_batched_tokens=sizes.chunk, max_num_seqs=sizes.requests,
    ) as engine:  # fmt: skip
        _run_two_turns(engine, first, more, sizes.answer)  # loads kernels and captures the graphs
        engine.cache.reset()
        start = time.perf_counter()
        requests = _run_two_turns(engine, first, more, sizes.answer)
        seconds = time.perf_counter() - start
    prefilled = sum(request.prefilled_tokens for request in requests)
    asked = sum(len(request.prompt_token_ids) for request in requests)
    yield Figure(
        f"{name}: two turns of {len(first)} requests", seconds * 1e3, "ms",
        note=f"prefilled {prefilled} of {asked} prompt tokens",
    )  # fmt: skip


def _run_two_turns(
    engine: Engine, first: list[Tokens], more: list[Tokens], max_tokens: int
) -> list[Request]:
    requests = run_all(engine, first, max_tokens)
    second = [
        np.concatenate([prompt, np.array(answer, np.int32), rest])
        for prompt, answer, rest in zip(first, generated(requests), more, strict=True)
    ]
    return requests + run_all(engine, second, max_tokens)
