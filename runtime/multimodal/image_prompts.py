"""Writes images into prompts: the text of each in place of the template's placeholder, and the keys
of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixcache.base import Tokens
from radixcache.errors import InvalidRequest
from radixcache.runtime.multimodal.image import Image, ImageKeys, PlacedImage
from radixcache.runtime.multimodal.image_input import image_sources
from radixcache.runtime.multimodal.processor import ImageProcessor


class ImagePrompts:
    """What one model makes of images in prompts; for any number of threads."""

    def __init__(self, processor: ImageProcessor, vocab_size: int) -> None:
        self._processor, self._keys = processor, ImageKeys(vocab_size)

    def prepare(self, given: Sequence[object]) -> list[Image]:
        """The images that were given, as the model reads them.

        Raises:
            InvalidRequest: one is no image, or too large, or there are too many.
        """
        return [self._processor.prepare(source) for source in image_sources(given)]

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


class NoImages:
    """Of a model that reads none, for a reason."""

    def __init__(self, reason: str = "this model takes no images: send text") -> None:
        self._reason = reason

    def prepare(self, given: Sequence[object]) -> list[Image]:
        raise InvalidRequest(self._reason)

    def write(self, text: str, images: Sequence[Image]) -> str:
        raise InvalidRequest(self._reason)

    def place(self, tokens: Tokens, images: Sequence[Image]) -> tuple[PlacedImage, ...]:
        raise InvalidRequest(self._reason)
