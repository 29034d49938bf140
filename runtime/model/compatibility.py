"""Decides which models may run over KV pages, and says why the others may not.

Many models would load, run and be silently wrong over pages. Three checks refuse them, each with a
`ModelError` of one sentence: of the config (`check_config`), of the attention calls of a probe
(`check_calls`), and whether the logits over pages equal those of transformers' attention
(`check_logits` in `verification.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from radixcache.errors import ModelError
from radixcache.kernels.attention import LayerKind
from radixcache.runtime.model import rope_scaling

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

_ATTENTION = {"full_attention", "sliding_attention"}
RECURRENT = {"linear_attention", "conv", "hybrid"}
"""Layer types that keep a state of all earlier tokens; a hybrid one attends, too."""
_NEITHER = {"moe", "mlp"}

_MOST = {"num_hidden_layers": 4096, "num_attention_heads": 1 << 16, "head_dim": 1 << 16}


class AttentionCall(NamedTuple):
    """One call of the attention function during the probe."""

    layer: int
    kind: LayerKind
    causal: bool
    masked: bool


def refusal(model_type: str, reason: str) -> ModelError:
    """The error for a model type that is refused."""
    return ModelError(f"model type {model_type!r} cannot run over KV pages: {reason}")


def check_sizes(settings: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has: building so many layers or heads would never end.

    Raises:
        ModelError: a size of the config is beyond all reason.
    """
    parts: list[Any] = [settings]
    for part in parts:  # also what is said of a text, or of one layer
        if not isinstance(part, Mapping):
            continue
        parts += part.values()
        for name, most in _MOST.items():
            size = part.get(name)
            if isinstance(size, int) and size > most:
                raise ModelError(f"the model's config says {name} {size}: no model has over {most}")


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a model by its config.

    Raises:
        ModelError: encoder-decoder, layer types that are neither full and sliding attention nor
            recurrent, or RoPE frequencies that change with the longest position of a batch.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise refusal(config.model_type, "it is an encoder-decoder")
    unknown = {*layer_types(config)} - _ATTENTION - RECURRENT - _NEITHER
    if unknown:
        names = ", ".join(sorted(unknown))
        raise refusal(
            config.model_type,
            f"it has layers of type {names}, which are no attention and not recurrent",
        )
    for parameters in (getattr(text, "rope_parameters", None) or {}).values():
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind in rope_scaling.KINDS:  # of one layer type among others
            raise refusal(
                config.model_type,
                f"its {kind} RoPE rotates a key by the longest position of its batch",
            )


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether some layers keep a state of all earlier tokens."""
    return not RECURRENT.isdisjoint(layer_types(config))


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; empty if the config has none, and all layers attend."""
    return list(getattr(config.get_text_config(), "layer_types", None) or ())


def check_calls(config: PreTrainedConfig, calls: Sequence[AttentionCall]) -> None:
    """Refuse a model whose attention is not one causal call of a known kind in every layer.

    Raises:
        ModelError: layers without attention or with two calls, masks of the model's own,
            bidirectional attention, or a window that is empty or only in the config.
    """
    text = config.get_text_config()
    layers = [call.layer for call in calls]
    if not layers:
        raise refusal(config.model_type, "it has no layer with attention")
    if len(set(layers)) < len(layers):
        raise refusal(config.model_type, "it calls attention more than once in a layer")
    types = layer_types(config)
    attending = [i for i, kind in enumerate(types) if kind in _ATTENTION or kind == "hybrid"]
    attending = attending if types else [*range(text.num_hidden_layers)]
    if sorted(layers) != attending:
        raise refusal(
            config.model_type,
            f"its config names {len(attending)} layers with attention, "
            f"but attention runs in {len(layers)}",
        )
    if not all(call.causal for call in calls):
        raise refusal(config.model_type, "its attention is bidirectional")
    if any(call.masked for call in calls):
        raise refusal(config.model_type, "it builds attention masks of its own")
    windows = {call.layer: call.kind.window for call in calls}
    if any(window is not None and window < 1 for window in windows.values()):
        raise refusal(config.model_type, "it has layers with a window of no token")
    for layer, kind in enumerate(types):
        if layer in windows and (kind == "sliding_attention") != (windows[layer] is not None):
            raise refusal(
                config.model_type, f"layer {layer} is of type {kind}, window {windows[layer]}"
            )
    expected = getattr(text, "sliding_window", None)
    windowed = bool(types) or any(windows.values())  # layer types were checked above
    if expected and getattr(text, "use_sliding_window", True) and not windowed:
        raise refusal(
            config.model_type, f"its window of {expected} never reaches the attention function"
        )
