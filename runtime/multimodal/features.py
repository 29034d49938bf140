"""The rows that a vision tower makes of an image, kept so that it is encoded once."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
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
        num_hits: calls that found rows, kept or on their way.
        seconds: the time that encoding took.
    """

    def __init__(self, encode: EncodeImage, max_bytes: int = KEPT_BYTES) -> None:
        """`encode` is called for one image at a time."""
        self._encode, self._max_bytes = encode, max_bytes
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._coming: dict[bytes, Future[ImageFeatures]] = {}
        self._lock, self._encoding = Lock(), Lock()
        self._num_bytes = 0
        self.num_encoded, self.num_hits, self.seconds = 0, 0, 0.0

    def get(self, image: Image) -> ImageFeatures:
        """The rows of an image; a second call for it waits while the first encodes.

        Raises:
            Exception: what `encode` raises, in all calls that wait for it.
            ModelError: it gives more or fewer rows than the prompt has places for.
        """
        with self._lock:
            if (kept := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
                self.num_hits += 1
                return kept
            coming = self._coming.get(image.digest)
            if coming is None:
                mine = self._coming[image.digest] = Future[ImageFeatures]()
            else:
                self.num_hits += 1
        if coming is not None:
            return coming.result()
        try:
            found = self._encoded(image)
            with self._lock:
                self._keep(image.digest, found)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(found)
            return found
        finally:
            with self._lock:
                del self._coming[image.digest]

    def _encoded(self, image: Image) -> ImageFeatures:
        with self._encoding:
            start = perf_counter()
            found = self._encode(image)
            self.num_encoded += 1
            self.seconds += perf_counter() - start
        if (count := len(found.rows)) != image.num_rows:
            raise ModelError(f"an image of {image.num_rows} rows was encoded as {count}")
        return found

    def _keep(self, digest: bytes, features: ImageFeatures) -> None:
        if features.nbytes > self._max_bytes:
            return
        self._kept[digest] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes:
            _, gone = self._kept.popitem(last=False)
            self._num_bytes -= gone.nbytes
