"""Loads a model from a folder, a GGUF file or the hub, with the decoder loop or transformers."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from radixcache.errors import ModelError
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.native.library import quiet_torch
from radixcache.kernels.spec import Unknown
from radixcache.kernels.upload import on_device
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import check_model, read_settings
from radixcache.runtime.checkpoints.pooling import Pooling, gguf_pooling, read_pooling
from radixcache.runtime.model import exact as exactness
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.compatibility import (
    check_causal,
    check_decoder,
    check_quantization,
    check_sizes,
    quantization_of,
)
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.generation import read_defaults
from radixcache.runtime.model.gguf.config import (
    describe_gguf,
    generation_config_of,
    open_gguf,
    settings_of,
)
from radixcache.runtime.model.host.device import DTYPES, resolve_device, resolve_dtype
from radixcache.runtime.model.kv_dtype import check_kv_dtype, store_kv
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.pooler import Pooler
from radixcache.runtime.model.progress import report
from radixcache.runtime.model.quantized_activations import (
    check_activations,
    quantize_activations,
)
from radixcache.runtime.model.weights.quantized_checkpoint import QuantizedCheckpoint
from radixcache.runtime.model.weights.sources import GGUFSource, ModelWeights, SafetensorsSource

_log = logging.getLogger("radixcache")

_TRIED = {"torch": (2, 13), "transformers": (5, 24)}
"""The newest versions that `make test-machines` has run with, as in pyproject.toml."""


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    attention: AttentionBackend | None = None,
    exact: bool = False,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    quantized_activations: str = "auto",
    judges: tuple[int, ...] | None = None,
) -> PagedModel:
    """Load a causal LM from a folder, a GGUF file or the Hugging Face hub, if it runs right here.

    Code that comes with a checkpoint is never run.

    Args:
        dtype: "float32", "bfloat16", "float16", "fp16" and so on, or a torch dtype; "auto" is
            float32 on a CPU and the checkpoint's own elsewhere.
        device: a torch device; "auto" is CUDA where there is one.
        attention: the backend; None chooses the fastest that works.
        exact: a row's bits depend only on its own tokens (see `exact.py`).
        max_model_len: the most tokens of a sequence; None takes the config's.
        kv_cache_dtype: of the KV pages: "float16", "bfloat16", "int8" or "fp8"; "auto" is `dtype`.
        quantized_activations: whether products with quantized weights round their rows to 8 bits:
            "on", "off", or "auto": where that is faster, and no exact float32 is asked for.
        judges: the tokens for yes and no of a model that says nothing of scores (`Pooling`).

    Raises:
        ModelError: there is no such model, or it cannot be loaded or trusted over pages; or it, or
            this machine, cannot be exact; or it does not bear `kv_cache_dtype` or
            `quantized_activations`.
        InvalidRequest: a dtype or device that does not exist, or that is never exact; or a
            `kv_cache_dtype` or `quantized_activations` that the model or this device cannot have.
    """
    place = resolve_device(device)
    warn_of_untried({"torch": torch.__version__, "transformers": metadata.version("transformers")})
    with quiet_torch() if place.type == "cpu" else nullcontext():
        check_model(str(name_or_path))
        kind, file = resolve_dtype(dtype, place), open_gguf(name_or_path)
        settings = _settings(name_or_path, file)
        check_sizes(settings)
        check_causal(settings)
        pooling = read_pooling(name_or_path, settings) if file is None else gguf_pooling(file)
        if pooling.task is None:
            pooling = replace(pooling, judges=judges)
        check_kv_dtype(kv_cache_dtype, place, exact)
        check_activations(quantized_activations, place, kind)
        if exact:
            exactness.require(place, kind)
        model: PagedModel | None = None
        try:
            model = _load_decoder(
                name_or_path, settings, kind, place, attention, exact, file, max_model_len, pooling
            )
        except Unknown as reason:
            if file is not None:
                raise _unread(name_or_path, reason) from None
            if exact:
                raise ModelError(
                    f"exact mode takes only models of our own loop: {reason}"
                ) from None
            _log.info("transformers' own layers run this model: %s", reason)
        if model is None:  # outside of the handler, whose traceback holds the weights
            check_decoder(settings)
            check_quantization(name_or_path, settings)
            from radixcache.runtime.model.fallback.loading import load_transformers

            model = load_transformers(name_or_path, kind, place, attention, max_model_len)
            model.pooler = Pooler(replace(pooling, judges=None))
        quantize_activations(model, quantized_activations)
        store_kv(model, kv_cache_dtype, name_or_path)
        if exact:
            exactness.check(model)
        return model


def warn_of_untried(versions: dict[str, str]) -> None:
    """Warn of libraries that are newer than the tested ones."""
    for name, version in versions.items():
        tried = ".".join(map(str, _TRIED[name]))
        if tuple(map(int, re.findall(r"\d+", version)[:2])) > _TRIED[name]:
            _log.warning("%s %s is newer than what was tried, %s", name, version, tried)


def _settings(name_or_path: str | Path, file: GGUFFile | None) -> dict[str, Any]:
    """The settings of config.json, or of a GGUF file in its place."""
    if file is not None:
        try:
            return settings_of(file)
        except Unknown as reason:
            raise _unread(name_or_path, reason) from None
    if (found := read_settings(name_or_path)) is not None:
        return found
    from transformers.configuration_utils import PreTrainedConfig

    from radixcache.runtime.model.fallback.loading import call_transformers

    settings, _ = call_transformers(name_or_path, PreTrainedConfig.get_config_dict)
    if not isinstance(settings, dict):
        raise ModelError(f"the model at {name_or_path} does not load: its config is no dictionary")
    return settings


def _unread(name_or_path: str | Path, reason: Unknown) -> ModelError:
    """The error for a GGUF file that the loop cannot run; transformers ignores unknown settings."""
    return ModelError(f"the GGUF file {name_or_path} is not one that is understood: {reason}")


def _load_decoder(
    name_or_path: str | Path,
    settings: dict[str, Any],
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    attention: AttentionBackend | None = None,
    exact: bool = False,
    file: GGUFFile | None = None,
    max_model_len: int | None = None,
    pooling: Pooling = Pooling(),  # noqa: B008 - a constant
) -> PagedModel:
    """A model that the decoder loop knows, without importing transformers' layers.

    Args:
        file: the model's GGUF file, if the loop knows its architecture.

    Raises:
        Unknown: the loop does not know the model, or is wrong about it.
    """
    if file is None:
        architecture = describe(settings, max_model_len)
    else:
        architecture = describe_gguf(file, settings, max_model_len)
    if pooling.task is not None:  # its head, if it has none, is not used
        architecture = replace(architecture, tied=True)
    if dtype == "auto":
        named = str(settings.get("dtype") or settings.get("torch_dtype"))
        if named not in DTYPES:
            raise Unknown(f"the dtype of its config is {named}")
        dtype = DTYPES[named]
    report("fetching weights", 0.0)
    with ExitStack() as stack:
        if file is None:
            stored = stack.enter_context(open_checkpoint(name_or_path, device, dtype))
            said = quantization_of(name_or_path, settings)
            checkpoint = QuantizedCheckpoint(stored, name_or_path, said)
            weights: ModelWeights = SafetensorsSource(checkpoint, architecture)
        else:
            weights = GGUFSource(file, architecture, device, dtype)
        stack.enter_context(on_device(device))
        report("preparing kernels", 0.0)  # which are compiled at the first start
        model = Decoder(
            architecture,
            read_defaults(name_or_path) if file is None else generation_config_of(file),
            weights,
            dtype,
            device,
            attention,
            exact,
            max_model_len,
            pooling,
        )
        model.kept = checkpoint.kept if file is None else f" of {file.bits:.1f} bits a weight"
        return model
