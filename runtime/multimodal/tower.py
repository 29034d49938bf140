"""Makes an image's rows: transformers' own vision tower and projector of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from radixcache.errors import InvalidRequest, ModelError
from radixcache.runtime.multimodal.features import ImageFeatures

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig


_OF_TEXT = (
    r"^(model\.|language_model\.)*(layers|embed_tokens|norm|embed_tokens_per_layer)\."
    r"|(^|\.)(language_model|text_model|lm_head|mtp|audio_tower|embed_audio)\."
)
"""Tensors that are not the tower's or the projector's, by their names in files and in models."""


class VisionTower:
    """The tower and projector of a checkpoint, read when they are first needed.

    On a CPU they compute in float32, by the linear layers of our own kernels where those run: their
    sums do not depend on the number of threads, and weights that were stored in bfloat16 stay so.
    To read them takes six bytes a weight, 2.4 GB for the 0.4 billion of SigLIP.
    """

    def __init__(self, name_or_path: str | Path, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` and `device` are the text's, which the rows are given in."""
        self._name_or_path, self._device, self._dtype = name_or_path, device, dtype
        self._lock = Lock()

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, torch.Tensor]) -> ImageFeatures:
        """The rows of one image, by `ImageProcessor.inputs`.

        Raises:
            InvalidRequest: the tower's weights are quantised.
            ModelError: it cannot be read, the checkpoint lacks some of its weights, or they make
                numbers that are not finite.
        """
        with self._lock:
            encode = self._model.get_image_features
            names = inspect.signature(encode).parameters
            given = {n: x.to(self._device) for n, x in inputs.items() if n in names}
            given["pixel_values"] = given["pixel_values"].to(self._model.dtype)
            found = encode(**given, return_dict=True)
        deep = getattr(found, "deepstack_features", None) or ()
        rows = self._flat(found.pooler_output)
        if not rows.isfinite().all():
            raise ModelError(f"the vision tower of {self._name_or_path} gives rows without value")
        inner = torch.cat([self._flat(each)[None] for each in deep]) if deep else rows.new_empty(0)
        return ImageFeatures(rows, inner.view(len(deep), *rows.shape))

    def _flat(self, parts: Any) -> torch.Tensor:
        """[num_rows, hidden] of the tiles of an image, or a list of them."""
        parts = [parts] if isinstance(parts, torch.Tensor) else parts
        return torch.cat([part.flatten(0, -2) for part in parts]).to(self._dtype)

    @cached_property
    def _model(self) -> Any:
        """transformers' model of the checkpoint, with next to nothing of its text."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        from radixcache.runtime.model.fallback.loading import call_transformers
        from radixcache.runtime.model.fallback.patches.linear import pack_linears

        config = call_transformers(self._name_or_path, AutoConfig.from_pretrained)
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]

        class Tower(kind):
            _keys_to_ignore_on_load_missing = [_OF_TEXT]  # noqa: RUF012

        _empty_text(config)
        stored = self._stored()

        def read(*_: Any, **__: Any) -> Any:
            return Tower.from_pretrained(
                None, config=config, state_dict=stored, output_loading_info=True,
                dtype=torch.float32,  # another would be torch's default in all threads meanwhile
                attn_implementation="sdpa",
            )  # fmt: skip

        model, found = call_transformers(self._name_or_path, read)
        if lacking := sorted(found["missing_keys"]):
            raise ModelError(
                f"the checkpoint of {self._name_or_path} lacks {len(lacking)} weights that read "
                f"images, {lacking[0]} for one"
            )
        stored.clear()
        pack_linears(model)
        on_cpu = self._device.type == "cpu"
        return model.to(self._device, torch.float32 if on_cpu else self._dtype).eval()

    def _stored(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint that are not its text's."""
        from radixcache.runtime.model.checkpoint import FLOATS, open_checkpoint

        with open_checkpoint(self._name_or_path, torch.device("cpu"), self._dtype) as checkpoint:
            kept = [name for name in checkpoint.files if not re.search(_OF_TEXT, name)]
            for name in kept:
                if checkpoint.files[name].get_slice(name).get_dtype() not in (*FLOATS, "I64"):
                    raise InvalidRequest(
                        "images are not supported for this checkpoint: the weights that read "
                        f"them are quantised ({name})"
                    )
            return {name: checkpoint.stored(name) for name in kept}


def _empty_text(config: PreTrainedConfig) -> None:
    """Leave a text without layers, and with a vocabulary of one."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:  # a kind for each layer
            setattr(text, name, [])
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if hasattr(text, name):
            setattr(text, name, 0)
    for part in (config, text):
        part.tie_word_embeddings = False  # to an embedding that is not read
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if hasattr(config, "audio_config"):
        config.audio_config = None
