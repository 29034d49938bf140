"""An image of a prompt: the keys that stand for it in the index, and where its rows stand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256, shake_256
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.tokens import Tokens

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


@dataclass(frozen=True)
class ImageSource:
    """An image that somebody gave: checked by its header, and not decoded yet.

    Attributes:
        identity: SHA-256 of what was given; equal sources have equal pixels.
        open: decodes it: an image in RGB.
    """

    identity: bytes
    open: Callable[[], PILImage]


@dataclass(frozen=True, eq=False)
class Image:
    """An image as one model reads it.

    Attributes:
        source: what it is decoded from, once its rows are needed.
        digest: SHA-256 of its pixels after resizing, of the processor's settings, of the model and
            of the salt.
        text: what the processor puts in place of the chat template's placeholder.
        token: the placeholder of a row in `text`.
        num_rows: how often `token` is in `text`.
        grid: (height, width) in rows, for models whose RoPE has three axes; else None.
    """

    source: ImageSource
    digest: bytes
    text: str
    token: int
    num_rows: int
    grid: tuple[int, int] | None = None


EncodeImage = Callable[[Image], Any]
"""Gives the `ImageFeatures` of an image, whose module imports torch."""


class PlacedImage(NamedTuple):
    """An image in a prompt: its rows stand at the positions `places` [num_rows], and the index
    knows them by `keys` [num_rows] int32, ids outside the vocabulary."""

    image: Image
    places: NDArray[np.int64]
    keys: Tokens


class ImageKeys:
    """Makes the keys of images: words of 31 bits that follow from their digests.

    All of an image's keys hold 31 bits a row, but its first alone may be another image's, too, of
    which a prefix of one row would then be a hit. So no two of the last `most` images have the same
    first key: the later one has other words. For any number of threads.
    """

    def __init__(self, vocab_size: int, most: int = 1 << 17) -> None:
        self._vocab_size, self._most = vocab_size, most
        self._first: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()

    def of(self, image: Image) -> Tokens:
        """[num_rows] int32, at least `vocab_size`. O(num_rows)."""
        seed = image.digest
        while True:
            words = np.frombuffer(shake_256(seed).digest(4 * image.num_rows), np.uint32)
            keys = (self._vocab_size + words % (2**31 - self._vocab_size)).astype(np.int32)
            with self._lock:
                first = int(keys[0])
                if self._first.setdefault(first, image.digest) == image.digest:
                    self._first.move_to_end(first)
                    if len(self._first) > self._most:
                        self._first.popitem(last=False)
                    return keys
            seed = sha256(seed).digest()


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of parts, which cannot be confused with other parts."""
    found = sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
