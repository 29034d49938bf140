"""RoPE whose frequencies depend on the length: fixed by the length that the user allows.

transformers computes such frequencies from the longest position of a batch, so that a new key would
be rotated differently from the cached ones. Up to a length in the config they never change. A user
for longer sequences a user sets `max_model_len`, and all sequences get the frequencies of long ones
from the start (as with vLLM's `max_model_len` and llama.cpp's context size).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from radixcache.errors import ModelError

if TYPE_CHECKING:  # importing them takes seconds, of which our own loop has no need
    from transformers import PreTrainedModel
    from transformers.configuration_utils import PreTrainedConfig

_log = logging.getLogger("radixcache")

KINDS = ("dynamic", "longrope")


def fix_frequencies(model: PreTrainedModel, max_model_len: int | None) -> int | None:
    """Make the frequencies of `model` those of sequences up to the length that is returned: the
    most tokens of a sequence, None if RoPE sets no limit.

    Raises:
        ModelError: the config's parameters make no sense.
    """
    text = model.config.get_text_config()
    kind, short = _kind_of(text)
    if kind is None:
        return None
    longest = int(text.max_position_embeddings)
    if max_model_len is None or max_model_len <= short or (kind == "longrope" and longest <= short):
        if short < longest or kind == "dynamic":
            log_limit(short, kind)
        return min(short, longest)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = max_model_len if kind == "dynamic" else short + 1
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "inv_freq") and getattr(module, "rope_type", None) == kind:
            found, scaling = ROPE_INIT_FUNCTIONS[kind](text, module.inv_freq.device, length)
            module.inv_freq.copy_(found)
            module.rope_type, module.attention_scaling = "fixed", scaling
    return max_model_len if kind == "dynamic" else longest


def log_limit(length: int, kind: str) -> None:
    """Log why sequences have no more than `length` tokens."""
    _log.info(
        "sequences have %d tokens at most, for which the frequencies of its %s RoPE stay as they "
        "are; for more, say max_model_len",
        length,
        kind,
    )


def _kind_of(text: PreTrainedConfig) -> tuple[str | None, int]:
    """The kind of `KINDS`, if any, and the length up to which its frequencies do not change."""
    parameters = getattr(text, "rope_parameters", None) or {}
    kind = parameters.get("rope_type")
    if kind not in KINDS:
        return None, 0
    name = "original_max_position_embeddings"
    short = parameters.get(name) if kind == "longrope" else text.max_position_embeddings
    if type(short) is not int or short < 1:
        raise ModelError(f"the model's config makes no sense: {name} cannot be {short!r}")
    return kind, short
