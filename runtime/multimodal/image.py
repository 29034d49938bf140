"""An image of a prompt: the keys that stand for it in the index, and where its rows stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256, shake_256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.base import Tokens

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
        digest: SHA-256 of its pixels after resizing, of the processor's settings and of the model.
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

    def keys(self, vocab_size: int) -> Tokens:
        """[num_rows] int32: ids outside the vocabulary, which follow from the digest alone."""
        words = np.frombuffer(shake_256(self.digest).digest(4 * self.num_rows), np.uint32)
        return (vocab_size + words % (2**31 - vocab_size)).astype(np.int32)


class PlacedImage(NamedTuple):
    """An image in a prompt: its rows stand at the positions `places` [num_rows]."""

    image: Image
    places: NDArray[np.int64]


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of parts, which cannot be confused with other parts."""
    found = sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
