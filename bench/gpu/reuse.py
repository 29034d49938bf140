"""The same requests with a radix tree, in hash-block mode and without a cache.

Conversations about a few documents whose lengths are no multiples of a block, each with a question
of its own, and then a second turn that goes on from the first one's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from radixcache import HashBlockCache, NoCache, RadixCache
from radixcache.base import Tokens
from radixcache.bench.gpu.models import Cache, engine_on, generated, random_llama, run_all
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report
from radixcache.bench.gpu.sizes import Sizes
from radixcache.runtime.engine.request import Request

CACHES: dict[str, tuple[Cache, int]] = {
    "radix, page 16": (RadixCache, 16),
    "radix, page 1": (RadixCache, 1),
    "hash-block 16": (HashBlockCache, 16),
    "no cache": (NoCache, 16),
}


def run(place: Place, report: Report) -> None:
    model = random_llama(place, place.sizes.big)
    for name in CACHES:
        report.measure(name, _ours, place, model, name)


def two_turns(sizes: Sizes, answer: Callable[[list[Tokens]], list[list[int]]]) -> float:
    """Seconds of all conversations; `answer` takes those of a turn at once."""
    rng = np.random.default_rng(17)

    def tokens(low: int, high: int) -> Tokens:
        return rng.integers(0, sizes.big["vocab_size"], rng.integers(low, high)).astype(np.int32)

    documents = [tokens(*sizes.document) for _ in range(sizes.documents)]
    first = [
        np.concatenate([documents[i % len(documents)], tokens(5, 40)])
        for i in range(sizes.requests)
    ]
    more = [tokens(5, 40) for _ in first]
    start = time.perf_counter()
    answers = answer(first)
    answer(
        [
            np.concatenate([prompt, np.array(said, np.int32), rest])
            for prompt, said, rest in zip(first, answers, more, strict=True)
        ]
    )
    return time.perf_counter() - start


def room(sizes: Sizes) -> int:
    """Tokens of KV that hold both turns of everybody."""
    return 2 * sizes.requests * (sizes.document[1] + 40 + 2 * sizes.answer + 64)


def _ours(place: Place, model: PreTrainedModel, name: str) -> Figure:
    (cache, page_size), sizes = CACHES[name], place.sizes
    requests: list[Request] = []
    with engine_on(
        place, model, num_tokens=room(sizes), cache=cache, page_size=page_size,
        max_num_batched_tokens=sizes.chunk, max_num_seqs=sizes.requests,
    ) as engine:  # fmt: skip

        def answer(prompts: list[Tokens]) -> list[list[int]]:
            found = run_all(engine, prompts, sizes.answer)
            requests.extend(found)
            return generated(found)

        two_turns(sizes, answer)  # loads kernels and captures the graphs
        engine.cache.reset()
        requests.clear()
        seconds = two_turns(sizes, answer)
    prefilled = sum(request.prefilled_tokens for request in requests)
    asked = sum(len(request.prompt_token_ids) for request in requests)
    note = f"prefilled {prefilled} of {asked} prompt tokens"
    return Figure(f"{name}: two turns of {sizes.requests}", seconds * 1e3, "ms", note=note)
