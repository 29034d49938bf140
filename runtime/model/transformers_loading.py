"""Loads a model with transformers' own layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.configuration_utils import PreTrainedConfig

from radixcache.errors import ModelError, first_sentence
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.upload import on_device
from radixcache.runtime.model.compatibility import check_config
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.model.transformers_patches.linear import pack_linears
from radixcache.runtime.model.verification import check_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from radixcache.runtime.model.transformers_model import TransformersModel

_log = logging.getLogger("radixcache")


class _LatentsFailed(ModelError):
    """A model that keeps MLA's latents does not run, or its logits are wrong."""


def load_transformers(
    name_or_path: str | Path,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    attention: AttentionBackend | None = None,
    max_model_len: int | None = None,
    ranks: int = 1,
    make: Callable[..., TransformersModel] | None = None,
) -> PagedModel:
    """A model with transformers' own layers.

    Pages keep MLA's latents where the backend is free to choose, layers are not cut among ranks,
    and logits come out right; else they keep the keys and values of all heads.

    Args:
        ranks: the processes of this group, each of which loads its shard at the same time.
        make: wraps transformers' model; None is `TransformersModel`.

    Raises:
        ModelError: as `load_model`.
    """
    report("importing transformers' layers")
    from radixcache.runtime.model.transformers_model import TransformersModel

    config = load_config(name_or_path)

    def load(dtype: torch.dtype | Literal["auto"], device: torch.device, latents: bool) -> Any:
        model = _read(name_or_path, config, dtype, ranks)
        with on_device(device):
            report("packing weights")
            model = model.to(device).eval()
            has_latents = _patch(model, ranks, latents)
            try:
                paged = (make or TransformersModel)(model, attention, max_model_len)
                report("comparing logits")
                again = partial(load, torch.float32, torch.device("cpu"), latents)
                check_logits(paged, again if ranks == 1 else None)
            except ModelError as error:
                if has_latents:
                    raise _LatentsFailed(str(error)) from error
                raise
            return paged

    if attention is None and ranks == 1:
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
    ranks: int,
) -> Any:
    """transformers' model, or this rank's shard of it, with all its weights."""
    parallel: dict[str, Any] = {}
    if ranks > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        parallel["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=ranks)
    read = partial(
        _auto_class(config).from_pretrained,
        config=config,
        dtype=dtype,
        attn_implementation="eager",  # not what the config says: it may name a kernel of the hub
        output_loading_info=True,
        **parallel,
    )
    report("reading weights")
    model, found = call_transformers(name_or_path, read)
    if missing := sorted(found["missing_keys"]):
        count = len(missing)
        raise ModelError(
            f"the checkpoint of {name_or_path} lacks {count} of its weights, {missing[0]} for one"
        )
    return model


def _patch(model: PreTrainedModel, ranks: int, latents: bool) -> bool:
    """Replace layers of the model by ours; returns whether it keeps MLA's latents."""
    from radixcache.runtime.model.transformers_model import IMPLEMENTATION
    from radixcache.runtime.model.transformers_patches.mla import keep_latents
    from radixcache.runtime.model.transformers_patches.row_parallel_linear import take_local

    if ranks > 1:
        take_local(model)
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
    check_config(config)
    return config


def call_transformers(name_or_path: str | Path, read: Callable[..., Any]) -> Any:
    """`read(name_or_path)`, whose errors become one sentence.

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
            reason = "it has weights of other shapes than its config says, or lacks some"
        # transformers raises OSError for a missing model, and for one that needs a licence.
        absent = isinstance(error, OSError) and "gated repo" not in reason
        if absent and not Path(name_or_path).is_dir():
            raise ModelError(
                f"no model at {name_or_path}: no such folder, and no model of that name in reach"
            ) from None
        raise ModelError(f"the model at {name_or_path} does not load: {reason}") from None
