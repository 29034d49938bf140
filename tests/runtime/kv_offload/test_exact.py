"""In exact mode what comes from disk has the bits that are computed, whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from radixcache import LLM, ModelError, SamplingParams
from tests.helpers.models import tiny_model

Asked = tuple[tuple[int, ...], float, int]
"""A prompt, a temperature, and how many tokens are wanted."""


def draw_requests(random: Random, texts: list[list[int]]) -> list[Asked]:
    """Some requests that go on from the texts, whole or cut, for one call."""
    temperature, max_tokens = random.choice([0, 1.0]), random.choice([1, 6])
    requests = []
    for _ in range(random.choice([1, 3])):
        text = random.choice(texts)
        if random.random() < 0.4:
            text = text[: random.randint(1, len(text))]
        more = [random.randrange(200) for _ in range(random.choice([0, 1, 3, 17, 40]))]
        requests.append(((*text, *more), temperature, max_tokens))
    return requests


def answer(llm: LLM, requests: list[Asked]) -> list[Any]:
    """Their tokens with log-probabilities."""
    _, temperature, most = requests[0]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=most, logprobs=2)
    outputs = llm.generate([[*prompt] for prompt, *_ in requests], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "num_schedules", [3, pytest.param(30, marks=pytest.mark.exhaustive)], ids=str
)
def test_no_bit_differs_over_restarts(tmp_path: Path, num_schedules: int, family: str) -> None:
    """With windows that are kept apart, too."""
    windows: dict[str, Any] = {"sliding_window": 24} if family == "gemma3_text" else {}
    model = tiny_model(family, tmp_path / "model", **windows)
    try:
        plain = LLM(model, exact=True, cache="none", kv_cache_memory_bytes="8MB")
    except ModelError as error:  # without a compiler
        pytest.skip(str(error))
    num_loaded = 0
    for seed in range(num_schedules):
        random = Random(seed)
        texts = [[random.randrange(200) for _ in range(length)] for length in (5, 40, 130)]
        for _ in range(random.choice([2, 3])):
            memory, step = random.choice(["300kB", "1MB"]), random.choice([64, 2048])
            if windows:  # memory for four of them and a step
                memory, step = random.choice(["1MB", "2MB"]), random.choice([30, 128])
            with LLM(
                model,
                exact=True,
                kv_dir=tmp_path / str(seed),
                kv_dir_size=random.choice(["300kB", "2MB"]),
                kv_cache_memory_bytes=memory,
                max_num_batched_tokens=step,
            ) as llm:
                assert (llm.cache.windows is not None) == bool(windows)
                for _ in range(random.choice([1, 2, 4])):
                    requests = draw_requests(random, texts)
                    wanted = [answer(plain, [request])[0] for request in requests]
                    assert answer(llm, requests) == wanted, (seed, requests)
                    llm.call(llm.cache.check)
                num_loaded += llm.cache.stats.loaded_tokens
    plain.close()
    assert num_loaded
