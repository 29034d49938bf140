"""The sampling that a model's generation_config.json asks for."""

from __future__ import annotations

from typing import Any

from radixcache.errors import ModelError, first_sentence
from radixcache.runtime.sampling.params import SamplingParams


def default_params(config: Any) -> SamplingParams:
    """By the settings of `config`, a `GenerationDefaults` or transformers' `GenerationConfig`.

    Without them, the temperature is 1, as in OpenAI's API and vLLM; ``"do_sample": false`` takes
    the likeliest token.
    """
    greedy = getattr(config, "do_sample", None) is False

    def setting(name: str, default: Any) -> Any:
        value = getattr(config, name, None)
        return default if value is None or greedy else value

    try:
        return SamplingParams(
            temperature=0.0 if greedy else float(setting("temperature", 1.0)),
            top_p=float(setting("top_p", 1.0)),
            top_k=int(setting("top_k", 0)),
            min_p=float(setting("min_p", 0.0)),
            max_tokens=int(getattr(config, "max_new_tokens", None) or 16),
            repetition_penalty=float(getattr(config, "repetition_penalty", None) or 1.0),
        )
    except (TypeError, ValueError, OverflowError) as error:
        reason = first_sentence(error)
        raise ModelError(f"the model's generation config makes no sense: {reason}") from None
