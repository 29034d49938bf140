"""The rows that a vision tower makes of an image, kept so that it is encoded once."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import torch

from radixcache.errors import ModelError
from radixcache.runtime.multimodal.image import EncodeImage, Image

KEPT_BYTES = 256 << 20
"""Rows that are kept by default: 50 images of 1280 rows of 2048 in bfloat16."""


class ImageFeatures(NamedTuple):
    """The rows of an image, on the text model's device and in its dtype.

    Attributes:
        rows: [num_rows, hidden_size] in place of embeddings, not times the text model's factor.
        deep: [L, num_rows, hidden_size] added behind each of the first L layers (DeepStack); L may
            be 0.
    """

    rows: torch.Tensor
    deep: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self.rows.nbytes + self.deep.nbytes


class KeptFeatures:
    """Rows by the digest of their image, least recently used first to go. Any thread may call.

    Attributes:
        num_encoded: images that were encoded.
        num_hits: calls that found rows.
        seconds: the time that encoding took.
    """

    def __init__(self, encode: EncodeImage, max_bytes: int = KEPT_BYTES) -> None:
        """`encode` is called for one image at a time."""
        self._encode, self._max_bytes = encode, max_bytes
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._lock, self._encoding = Lock(), Lock()
        self._num_bytes = 0
        self.num_encoded, self.num_hits, self.seconds = 0, 0, 0.0

    def get(self, image: Image) -> ImageFeatures:
        """The rows of an image; a second call for it waits while the first encodes.

        Raises:
            Exception: what `encode` raises.
            ModelError: it gives more or fewer rows than the prompt has places for.
        """
        if (kept := self._find(image.digest)) is not None:
            return kept
        with self._encoding:
            if (kept := self._find(image.digest)) is not None:
                return kept
            start = perf_counter()
            found = self._encode(image)
            self.num_encoded += 1
            self.seconds += perf_counter() - start
            if (count := len(found.rows)) != image.num_rows:
                raise ModelError(f"an image of {image.num_rows} rows was encoded as {count}")
            with self._lock:
                self._keep(image.digest, found)
            return found

    def _find(self, digest: bytes) -> ImageFeatures | None:
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                self.num_hits += 1
            return kept

    def _keep(self, digest: bytes, features: ImageFeatures) -> None:
        if features.nbytes > self._max_bytes:
            return
        self._kept[digest] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes:
            _, gone = self._kept.popitem(last=False)
            self._num_bytes -= gone.nbytes
