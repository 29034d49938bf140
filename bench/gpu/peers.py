"""The requests of `reuse`, by transformers' own continuous batching.

It runs a thread of its own, so it comes last: whatever it leaves behind disturbs nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import transformers
from transformers import GenerationConfig, PreTrainedModel

from radixcache.base import Tokens
from radixcache.bench.gpu.models import free_memory
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, NotRun, Report
from radixcache.bench.gpu.reuse import prompts_of_two_turns


def run(place: Place, report: Report, model: PreTrainedModel) -> None:
    report.measure("transformers' generate_batch", partial(_peer, place, model))


def _peer(place: Place, model: PreTrainedModel) -> Iterator[Figure]:
    """transformers' own continuous batching; two calls, so its cache starts empty in each."""
    sizes = place.sizes
    free_memory()
    first, more = prompts_of_two_turns(place, sizes.big["vocab_size"])
    before = model.config._attn_implementation
    config = GenerationConfig(max_new_tokens=sizes.answer, do_sample=False, eos_token_id=-1)
    config.pad_token_id = 0
    options: dict[str, Any] = {}
    try:
        from transformers import ContinuousBatchingConfig

        tokens = sum(len(prompt) + 2 * sizes.answer + 64 for prompt in first) * 2
        settings: dict[str, Any] = {
            "num_blocks": tokens // 256 + 2 * sizes.requests,
            "max_batch_tokens": min(sizes.chunk, 2048),
        }
        # Else it looks for flash attention, over the network. How to say so changed in 5.23.
        can_say = "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__
        model.set_attn_implementation("sdpa" if can_say else "paged|sdpa")
        settings |= {"auto_switch_to_flash": False} if can_say else {}
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
        free_memory()
    yield Figure(
        f"transformers {transformers.__version__}: two turns of {len(first)} requests",
        (one + two) * 1e3,
        "ms",
        note="sdpa attention; its start-up is in the time, twice",
    )
