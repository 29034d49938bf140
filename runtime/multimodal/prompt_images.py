"""The images of a prompt: its keys, and what their rows change of positions and attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.runtime.multimodal.image import Image, PlacedImage
from radixcache.tokens import Tokens


class Part(NamedTuple):
    """Rows `of_image` of an image, which stand at `rows`, counted from a stretch's start."""

    image: Image
    of_image: slice
    rows: NDArray[np.int64]


class PromptImages:
    """The images of one prompt of `length` tokens, in order.

    Args:
        axes: whether the model's RoPE has three axes.
        both_ways: whether an image's rows see each other in both directions; then they are computed
            in one step.
    """

    def __init__(
        self, images: Sequence[PlacedImage], length: int, *, axes: bool, both_ways: bool
    ) -> None:
        self.images = images
        self.features: dict[bytes, Any] = {}
        """Features by digest, from when the prompt waits for them until its rows are computed."""
        places = np.concatenate([image.places for image in images])
        apart = np.flatnonzero(np.diff(places) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, apart)]
        self._whole = runs if both_ways else []
        self._positions = _three_axes(images, length) if axes else None

    @property
    def longest(self) -> int:
        """Tokens that must be computed in one step."""
        return max((end - start for start, end in self._whole), default=1)

    def keys(self, tokens: Tokens) -> Tokens:
        """The prompt's keys, of its tokens."""
        return keys_of(tokens, self.images)

    def tokens(self, keys: Tokens) -> Tokens:
        """The prompt's tokens, of its keys."""
        found = keys.copy()
        for image in self.images:
            found[image.places] = image.image.token
        return found

    def at(self, position: int) -> tuple[int, int, int] | None:
        """The image with a row at a position, as `Miss.image` says it."""
        for number, (image, places, _) in enumerate(self.images, 1):
            if position in places:
                return number, len(self.images), image.num_rows
        return None

    def drop_features(self, end: int) -> None:
        """The first `end` tokens are computed: rows are needed of images that end behind them."""
        if self.features:
            needed = {image.digest for image, places, _ in self.images if places[-1] >= end}
            self.features = {name: self.features[name] for name in needed & self.features.keys()}

    def parts(self, start: int, end: int) -> Iterator[Part]:
        """The parts of images within positions [start, end)."""
        for image, places, _ in self.images:
            first, last = np.searchsorted(places, (start, end)).tolist()
            if first < last:
                yield Part(image, slice(first, last), places[first:last] - start)

    def positions(self, start: int, end: int) -> NDArray[np.int64] | None:
        """[3, end - start] positions for RoPE; None where they are those of the tokens."""
        if self._positions is None:
            return None
        length = self._positions.shape[1]
        behind = np.arange(max(start, length), end) + (self._positions[0, -1] + 1 - length)
        return np.concatenate(
            [self._positions[:, start:end], np.broadcast_to(behind, (3, len(behind)))], axis=1
        )

    def ahead(self, start: int, end: int) -> NDArray[np.int32] | None:
        """[end - start] keys behind its own that each row sees; None if no row sees any."""
        found = None
        for first, last in self._whole:
            if start < last and first < end:
                found = np.zeros(end - start, np.int32) if found is None else found
                rows = np.arange(max(first, start), min(last, end))
                found[rows - start] = min(last, end) - 1 - rows
        return found

    def cut(self, start: int, end: int) -> int:
        """Where a step that computes tokens [start, end) should end: at most there, unless an image
        begins at `start`, and not within an image whose rows are computed together."""
        for first, last in self._whole:
            if first < end < last:
                return first if start < first else last
        return end

    def resume(self, position: int) -> int:
        """The position at which a sequence may resume whose first `position` tokens have KV."""
        return next((first for first, last in self._whole if first < position < last), position)


def keys_of(tokens: Tokens, images: Sequence[PlacedImage]) -> Tokens:
    """A prompt's keys in the index: its tokens, with those of images at their places."""
    found = tokens.copy() if images else tokens
    for image in images:
        found[image.places] = image.keys
    return found


def behind(images: Sequence[PlacedImage], count: int) -> Sequence[PlacedImage]:
    """The images of a prompt that has so many more tokens before it."""
    if not count:
        return images
    return [image._replace(places=image.places + count) for image in images]


def _three_axes(images: Sequence[PlacedImage], length: int) -> NDArray[np.int64]:
    """[3, length]: text goes on in all axes alike; an image's rows lie on its grid, and what comes
    behind it begins behind the grid's longer side (Qwen2-VL's M-RoPE)."""
    found, at, done = np.empty((3, length), np.int64), 0, 0
    for image, places, _ in images:
        assert image.grid is not None
        height, width = image.grid
        start = int(places[0])
        found[:, done:start] = np.arange(at, at + start - done)
        at += start - done
        done = start + height * width
        rows = np.arange(height * width)
        found[:, start:done] = at
        found[1, start:done] += rows // width
        found[2, start:done] += rows % width
        at += max(height, width)
    found[:, done:] = np.arange(at, at + length - done)
    return found
