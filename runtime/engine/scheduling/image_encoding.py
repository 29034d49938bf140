"""Encodes the images of waiting prompts on a thread of its own, so that no step waits for a vision
tower. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from radixcache.base import Tokens
from radixcache.runtime.multimodal.image import EncodeImage, Image
from radixcache.runtime.request import Request, Sequence

MOST = 16
"""Images that are encoded or wait for it; others follow when some of these are done."""

_WAIT = 0.005  # seconds

Match = Callable[[Tokens, Hashable], int]


class ImageEncoding:
    """The images that are being encoded for waiting sequences, one at a time, in order.

    Args:
        encode: gives the features of an image; None if there are no images.
    """

    def __init__(self, encode: EncodeImage | None = None) -> None:
        self._encode = encode
        self._thread = ThreadPoolExecutor(1, "vision-tower")
        self._coming: dict[bytes, tuple[Future[Any], Request]] = {}
        self._failed: dict[Sequence, BaseException] = {}

    def waits(self, sequence: Sequence, match: Match) -> bool:
        """Whether a waiting sequence lacks rows of images behind its hit, which `match` finds; they
        are being encoded then."""
        images, request = sequence.request.images, sequence.request
        if images is None:
            return False
        lacking = [image for image in images.images if image.image.digest not in images.features]
        hit = images.resume(match(sequence.tokens, request.namespace)) if lacking else 0
        lacking = [image for image in lacking if image.places[-1] >= hit]
        there = [self._is_there(image.image, sequence) for image in lacking]  # asks for all
        return not all(there)

    def _is_there(self, image: Image, sequence: Sequence) -> bool:
        assert self._encode is not None and sequence.request.images is not None
        if image.digest not in self._coming:
            self._forget_ended()
            if len(self._coming) < MOST:
                future = self._thread.submit(self._encode, image)
                self._coming[image.digest] = future, sequence.request
            return False
        future, _ = self._coming[image.digest]
        if not future.done():
            return False
        del self._coming[image.digest]
        if (error := future.exception()) is not None:
            self._failed[sequence] = error
            return False
        sequence.request.images.features[image.digest] = future.result()
        return True

    def _forget_ended(self) -> None:
        for digest, (future, request) in [*self._coming.items()]:
            if request.finished and (future.cancel() or future.done()):
                del self._coming[digest]

    def take_failed(self) -> dict[Sequence, BaseException]:
        """The sequences whose images failed since the last call, and why."""
        failed, self._failed = self._failed, {}
        return failed

    def wait(self) -> None:
        """Wait a little for an image: nothing can be computed before."""
        if self._coming:
            wait([future for future, _ in self._coming.values()], _WAIT, "FIRST_COMPLETED")
