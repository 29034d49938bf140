"""What one model makes of images: their text and keys in prompts, and their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.kernels.kv_format import FP8
from radixcache.runtime.checkpoints.model_files import find_file, find_gguf
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.multimodal.families import ImageFamily, image_family
from radixcache.runtime.multimodal.features import ImageFeatures, KeptFeatures
from radixcache.runtime.multimodal.image import Image, ImageKeys, ImageSource, PlacedImage
from radixcache.runtime.multimodal.image_input import check_number, check_total, image_source
from radixcache.runtime.multimodal.processor import ImageProcessor
from radixcache.runtime.multimodal.tower import VisionTower
from radixcache.tokens import Tokens


class Images:
    """Of one model that reads images; for any number of threads.

    Attributes:
        features: the rows that are kept; None of a model that reads none.
    """

    features: KeptFeatures | None

    def __init__(
        self, name_or_path: str, family: ImageFamily, model: PagedModel, config: bytes
    ) -> None:
        """`config` is the checkpoint's, by which images of different models have other keys."""
        self._processor = ImageProcessor(name_or_path, family, config, model.max_context)
        tower = VisionTower(name_or_path, model.device, model.dtype)
        self.features = KeptFeatures(lambda image: tower.encode(self._processor.inputs(image)))
        self._keys = ImageKeys(model.vocab_size)

    def prepare(self, given: Sequence[object], cache_salt: str | None = None) -> list[Image]:
        """The images that were given, as the model reads them; nothing of them is found by another
        salt.

        Raises:
            InvalidRequest: one is no image, or too large, or there are too many.
        """
        check_number(len(given))
        sources = [one if isinstance(one, ImageSource) else image_source(one) for one in given]
        check_total(sources)
        return [self._processor.prepare(source, cache_salt) for source in sources]

    def write(self, text: str, images: Sequence[Image]) -> str:
        """A rendered text with the images' texts in place of placeholders.

        Raises:
            InvalidRequest: there is not one placeholder for each image.
        """
        placeholder = self._processor.placeholder
        first, *rest = text.split(placeholder)
        if len(rest) != len(images):
            raise InvalidRequest(
                f"{len(images)} image{'s' * (len(images) != 1)} for {len(rest)} placeholders "
                f"{placeholder!r} in the prompt"
            )
        pieces = (image.text + piece for image, piece in zip(images, rest, strict=True))
        return "".join([first, *pieces])

    def place(self, tokens: Tokens, images: Sequence[Image]) -> tuple[PlacedImage, ...]:
        """The images with their places in a prompt whose text `write` gave.

        Raises:
            InvalidRequest: the text has tokens of rows beside those of the images.
        """
        places = np.flatnonzero(tokens == self._processor.token)
        ends = np.cumsum([image.num_rows for image in images])
        if len(places) != ends[-1]:
            raise InvalidRequest("the text has tokens that stand for rows of images")
        parts = np.split(places, ends[:-1])
        return tuple(
            PlacedImage(image, of_image, self._keys.of(image))
            for image, of_image in zip(images, parts, strict=True)
        )

    @property
    def counts(self) -> tuple[int, int, float]:
        """Images that were encoded, those whose rows were kept, and the tower's seconds."""
        kept = self.features
        return (0, 0, 0.0) if kept is None else (kept.num_encoded, kept.num_hits, kept.seconds)

    def encode(self, image: Image) -> ImageFeatures:
        """The rows of an image, which are kept for a while."""
        assert self.features is not None
        return self.features.get(image)


class NoImages(Images):
    """Of a model that reads none, for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason, self.features = reason, None

    def prepare(self, given: Sequence[object], cache_salt: str | None = None) -> list[Image]:
        raise InvalidRequest(self._reason)


def open_images(name_or_path: str, model: PagedModel) -> Images:
    """What a model makes of images; nothing of it is read before the first one."""
    if find_gguf(name_or_path):
        return NoImages("images are not read from GGUF files: send text")
    file = find_file(name_or_path, "config.json")
    settings = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    try:
        family = image_family(settings)
        _check(family, settings, model)
    except InvalidRequest as error:
        return NoImages(str(error))
    return Images(name_or_path, family, model, json.dumps(settings, sort_keys=True).encode())


def _check(family: ImageFamily, settings: dict[str, Any], model: PagedModel) -> None:
    """Refuse the images of a model whose text has no place for them."""
    if not isinstance(model, Decoder):
        raise InvalidRequest("images are for models of our own loop, which this is not")
    if family.axes and not model.rope_axes:
        raise InvalidRequest("the RoPE of this model lacks the sections of images: send text")
    architecture = model.architecture
    deep = settings["vision_config"].get("deepstack_visual_indexes") or ()
    if family.deep and len(deep) >= len(architecture.layers):
        raise InvalidRequest("this model has fewer layers than images need: send text")
    padding = settings.get("text_config", {}).get("pad_token_id")
    if architecture.per_layer_shapes and padding:  # a row of an image has its inputs
        raise InvalidRequest(f"images are not supported for a model whose padding is {padding}")
    if model.both_ways and model.kv_dtype == FP8:
        raise InvalidRequest("images of this model need KV in another format than fp8")
