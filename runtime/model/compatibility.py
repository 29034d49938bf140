"""Decides which models may run over KV pages, and says why the others may not.

Many models would load, run and be silently wrong over pages. Four checks refuse them, each with a
`ModelError` of one sentence: of weights in codes (`check_quantization`), of the config
(`check_config`), of the attention calls of a probe (`check_calls`), and whether the logits over
pages equal those of transformers' attention (`check_logits` in `verification.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from radixcache.errors import ModelError
from radixcache.kernels.attention import LayerKind
from radixcache.runtime.checkpoints.model_files import find_file
from radixcache.runtime.model import rope_scaling
from radixcache.runtime.model.checkpoint import FLOATS, headers, is_spare

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


_ENCODER = "it is an encoder, whose tokens see later ones, and has no prefix to cache"


def check_causal(settings: Mapping[str, Any]) -> None:
    """Refuse a config by which tokens see later ones; `ModelError`."""
    parts = (part for part in (settings, settings.get("text_config")) if isinstance(part, Mapping))
    if any(
        part.get("use_bidirectional_attention") in (True, "all") or not part.get("is_causal", True)
        for part in parts
    ):
        raise refusal(str(settings.get("model_type")), _ENCODER)


def check_decoder(settings: Mapping[str, Any]) -> None:
    """Refuse a family of encoders, some of which transformers would load as decoders;
    `ModelError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    kind, is_decoder = str(settings.get("model_type")), settings.get("is_decoder")
    if kind in MASKED and not is_decoder and not settings.get("is_encoder_decoder"):
        raise refusal(kind, _ENCODER)


class Quantization(NamedTuple):
    """What a model says of its weights: its `quant_method`, or ours for one that it lacks, all
    settings, and what errors call it."""

    name: str
    settings: Mapping[str, Any]
    named: str


_UNSAID = Quantization("", {}, "a method that its config does not name")


def quantization_of(name_or_path: str | Path, settings: Mapping[str, Any]) -> Quantization:
    """What a config says of a model's weights, or of its text's.

    Raises:
        ModelError: what it says is no object.
    """
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    given = [part.get("quantization_config") for part in parts]
    mlx = settings.get("quantization")
    given.append(mlx if isinstance(mlx, dict) and "group_size" in mlx else None)
    found: Any = next((each for each in given if each not in (None, {})), {})
    if not isinstance(found, dict):
        problem = f"its quantization_config is no object, but {str(found)[:100]!r}"
        raise ModelError(f"the model at {name_or_path} does not load: {problem}")
    if not found:
        return _UNSAID
    method = str(found.get("quant_method") or ("mlx" if "group_size" in found else ""))
    kind = found.get("quant_algo") or found.get("format")
    named = method.replace("mlx", "MLX") or "a method without a name"
    return Quantization(method, found, f"{named}{f' ({kind})' if kind else ''}"[:100])


def modelopt(name_or_path: str | Path) -> Quantization:
    """What NVIDIA's Model Optimizer says in a file of its own, if there is one."""
    said = find_file(str(name_or_path), "hf_quant_config.json")
    algo = said and re.search(rb'"quant_algo"\s*:\s*"(\w+)"', Path(said).read_bytes())
    return Quantization("modelopt", {}, f"ModelOpt's {algo[1].decode()}") if algo else _UNSAID


def check_quantization(name_or_path: str | Path, settings: Mapping[str, Any]) -> None:
    """Refuse weights that are quantised in a way that nothing here reads.

    Raises:
        ModelError: a method that transformers does not know, and skips; codes without a method,
            packed by compressed-tensors, or of FP8 in blocks of which the last is cut.
    """
    said = quantization_of(name_or_path, settings)
    refused = f"the model at {name_or_path} does not load: nothing here reads weights"
    found, method = said.settings, said.name
    if found and method != "mxfp4":  # the loop's own, without this import
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

        if not (method in KNOWN or found.get("load_in_4bit") or found.get("load_in_8bit")):
            raise ModelError(f"{refused} quantised by {said.named}")
    tensors = headers(name_or_path)
    # Where nothing multiplies FP8, transformers makes floats of blocks as high as rows / scales.
    keeps_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    sizes = sizes if isinstance(sizes := found.get("weight_block_size"), list) else [128, 128]
    for name, (dtype, shape) in tensors.items():
        kinds = FLOATS if name.endswith("weight") else (*FLOATS, "BOOL", "I64", "bool", "int64")
        is_said = found and (method != "mxfp4" or name.endswith(("_blocks", "_scales")))
        if not (dtype in kinds or is_said or is_spare(name)):
            by = said if found else modelopt(name_or_path)
            raise ModelError(f"{refused} quantised by {by.named} ({name} is in {dtype})")
        if name.endswith(".weight_packed"):
            raise ModelError(f"{refused} packed by {said.named} ({name})")
        _, scales = tensors.get(f"{name}_scale_inv", ("", ()))
        blocks = zip(shape[-2:], scales[-2:], sizes, strict=False)
        if not keeps_fp8 and any(count > 1 and count * size != n for n, count, size in blocks):
            raise ModelError(f"{refused} of FP8 in blocks that cut {name} of {list(shape)}")


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a model by its config.

    Raises:
        ModelError: encoder-decoder, layer types that are neither full and sliding attention nor
            recurrent, RoPE frequencies that change with the longest position of a batch, or gates
            of another kind than its class computes.
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
    gate = getattr(text, "output_gate_type", None)
    if gate not in (None, "silu", "swish") and not hasattr(type(text), "output_gate_type"):
        raise refusal(
            config.model_type, f"its output_gate_type is {gate}, which transformers does not read"
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
