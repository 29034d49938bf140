"""Loads a model with transformers' own layers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.configuration_utils import PreTrainedConfig

from radixcache.errors import ModelError, first_sentence
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.upload import on_device
from radixcache.runtime.model.checkpoint import is_spare
from radixcache.runtime.model.compatibility import check_config
from radixcache.runtime.model.fallback.patches.linear import pack_linears
from radixcache.runtime.model.fallback.verification import check_logits
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_log = logging.getLogger("radixcache")


class _LatentsFailed(ModelError):
    """A model that keeps MLA's latents does not run, or its logits are wrong."""


def load_transformers(
    name_or_path: str | Path,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    attention: AttentionBackend | None = None,
    max_model_len: int | None = None,
) -> PagedModel:
    """A model with transformers' own layers.

    Pages keep MLA's latents where the backend is free to choose and logits come out right; else
    they keep the keys and values of all heads.

    Raises:
        ModelError: as `load_model`.
    """
    report("importing transformers' layers")
    from radixcache.runtime.model.fallback.model import TransformersModel

    config = load_config(name_or_path)
    quantised = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    why = f"; its weights are quantised by {quantised}" if quantised else ""

    def load(dtype: torch.dtype | Literal["auto"], device: torch.device, latents: bool) -> Any:
        model = _read(name_or_path, config, dtype, why)
        with on_device(device):
            report("packing weights")
            model = model.to(device).eval()
            has_latents = _patch(model, latents)
            try:
                paged = TransformersModel(model, attention, max_model_len)
                report("comparing logits")
                again = partial(load, torch.float32, torch.device("cpu"), latents)
                check_logits(paged, again)
            except ModelError as error:
                kind = _LatentsFailed if has_latents else ModelError
                raise kind(f"{error}{why}") from error
            return paged

    if attention is None:
        try:
            return load(dtype, device, True)
        except _LatentsFailed as error:
            _log.warning(
                "MLA's latents do not do, so keys and values of all heads are tried: %s",
                str(error),
            )
    return load(dtype, device, False)


def _read(
    name_or_path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | Literal["auto"],
    why: str,
) -> Any:
    """transformers' model with all its weights."""
    read = partial(
        _auto_class(config).from_pretrained,
        config=config,
        dtype=dtype,
        attn_implementation="eager",  # not what the config says: it may name a kernel of the hub
        output_loading_info=True,
    )
    report("reading weights")
    model, found = call_transformers(name_or_path, read, why)
    if missing := sorted(found["missing_keys"]):
        count = len(missing)
        raise ModelError(
            f"the checkpoint of {name_or_path} lacks {count} of its weights, {missing[0]} for one"
        )
    count = config.get_text_config().num_hidden_layers  # layers from there on draft tokens
    for name in sorted(found["unexpected_keys"]):
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if not is_spare(name) and not (layer and int(layer[1]) >= count):
            raise ModelError(f"the checkpoint of {name_or_path} has {name}, which no layer takes")
    return model


def _patch(model: PreTrainedModel, latents: bool) -> bool:
    """Replace layers of the model by ours; returns whether it keeps MLA's latents."""
    from radixcache.runtime.model.fallback.model import IMPLEMENTATION
    from radixcache.runtime.model.fallback.patches.mla import keep_latents

    has_latents = latents and keep_latents(model, IMPLEMENTATION)
    pack_linears(model)
    return has_latents


def _auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class for a config: a causal LM, or a model that also takes images, which gets
    texts only here (Mistral 3, Qwen-VL, InternVL, ...)."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    causal = type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    images = type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if images and not causal else AutoModelForCausalLM


def load_config(name_or_path: str | Path) -> PreTrainedConfig:
    """transformers' config of a model, checked before its weights are read."""
    from transformers import AutoConfig

    config: PreTrainedConfig = call_transformers(name_or_path, AutoConfig.from_pretrained)
    if getattr(config, "quantization_config", None) == {}:  # which asks for nothing
        del config.quantization_config
    check_config(config)
    return config


def call_transformers(name_or_path: str | Path, read: Callable[..., Any], why: str = "") -> Any:
    """`read(name_or_path)`, whose errors become one sentence; `why` follows one about shapes.

    Without `trust_remote_code`, which also holds for the generation config, transformers would ask
    on standard input.
    """
    try:
        return read(name_or_path, trust_remote_code=False)
    except Exception as error:
        reason = first_sentence(error)
        if "alloc_cpu" in reason:
            reason = "it takes more memory than there is"
        elif "ignore_mismatched_sizes" in reason or "conversion of the weights" in reason:
            reason = f"it has weights of other shapes than its config says, or lacks some{why}"
        # transformers raises OSError for a missing model, and for one that needs a licence.
        absent = isinstance(error, OSError) and "gated repo" not in reason
        if absent and not Path(name_or_path).is_dir():
            raise ModelError(
                f"no model at {name_or_path}: no such folder, and no model of that name in reach"
            ) from None
        raise ModelError(f"the model at {name_or_path} does not load: {reason}") from None
