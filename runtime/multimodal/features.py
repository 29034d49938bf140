"""What a vision tower makes of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from radixcache.runtime.multimodal.image import Image


class ImageFeatures(NamedTuple):
    """The rows of an image, on the text model's device.

    Attributes:
        rows: [num_rows, hidden_size] in place of embeddings, not times the text model's factor.
        deep: [L, num_rows, hidden_size] added behind each of the first L layers (DeepStack); L may
            be 0.
    """

    rows: torch.Tensor
    deep: torch.Tensor


EncodeImage = Callable[[Image], ImageFeatures]
"""Gives the features of an image, which may be kept."""


class KeptFeatures:
    def __init__(self, encode):
        self._encode, self._kept, self.num_encoded = encode, {}, 0

    def of(self, image):
        if image.digest not in self._kept:
            self.num_encoded += 1
            self._kept[image.digest] = self._encode(image)
        return self._kept[image.digest]
