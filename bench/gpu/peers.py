"""The requests of `reuse`, by transformers' own continuous batching."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedModel

from radixcache.base import Tokens
from radixcache.bench.gpu.models import random_llama
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, NotRun, Report
from radixcache.bench.gpu.reuse import room, two_turns


def run(place: Place, report: Report) -> None:
    report.measure("transformers' generate_batch", _peer, place)


def _peer(place: Place) -> Figure:
    try:
        model = random_llama(place, place.sizes.big)
        generate_two_turns(place, model)  # loads kernels
        seconds = generate_two_turns(place, model)
    except NotRun:
        raise
    except Exception as error:  # whatever it cannot do here
        raise NotRun(f"{type(error).__name__}: {error}") from error
    name = f"transformers {transformers.__version__}: two turns of {place.sizes.requests}"
    note = "sdpa attention; its start-up is in the time, twice"
    return Figure(name, seconds * 1e3, "ms", note=note)


def generate_two_turns(place: Place, model: PreTrainedModel) -> float:
    """Seconds by `generate_batch`: two calls, so its cache starts empty in each."""
    from transformers import ContinuousBatchingConfig

    sizes = place.sizes
    config = GenerationConfig(max_new_tokens=sizes.answer, do_sample=False, eos_token_id=-1)
    config.pad_token_id = 0
    settings: dict[str, Any] = {
        "num_blocks": room(sizes) // 256 + 2 * sizes.requests,
        "max_batch_tokens": min(sizes.chunk, 2048),
    }
    # Else it looks for flash attention, over the network. How to say so changed in 5.23.
    can_say = "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__
    model.set_attn_implementation("sdpa" if can_say else "paged|sdpa")
    settings |= {"auto_switch_to_flash": False} if can_say else {}
    options: Any = {"continuous_batching_config": ContinuousBatchingConfig(**settings)}

    def answer(prompts: list[Tokens]) -> list[list[int]]:
        generate: Any = model.generate_batch
        inputs = [prompt.tolist() for prompt in prompts]
        found = generate(inputs, generation_config=config, **options)
        answers = [result.generated_tokens for result in found.values()]
        if len(answers) != len(prompts) or not all(answers):
            raise NotRun(f"it answered {sum(map(bool, answers))} of {len(prompts)} prompts")
        return answers

    return two_turns(sizes, answer)
