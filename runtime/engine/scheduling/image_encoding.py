"""Encodes the images of waiting prompts on a thread of its own, so that no step waits for a vision
tower. Imports no torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from radixcache.runtime.multimodal.image import EncodeImage, Image
from radixcache.runtime.request import Request, Sequence

MOST = 16
"""Images that are encoded or wait for it, and prompts that wait with rows of images at hand; others
follow when some of these are done."""

_WAIT = 0.005  # seconds


class ImageEncoding:
    """The images that are being encoded for waiting sequences, one at a time, in order.

    Args:
        encode: gives the features of an image; None if there are no images.
    """

    def __init__(self, encode: EncodeImage | None = None) -> None:
        self.encode = encode
        self._thread = ThreadPoolExecutor(1, "vision-tower")
        self._coming: dict[bytes, tuple[Future[Any], Sequence]] = {}
        """What is encoded, and the waiting sequence that asked for it first."""
        self._asking: dict[Sequence, None] = {}
        """The waiting sequences that asked for images."""
        self._failed: dict[Request, BaseException] = {}

    def waits(self, sequence: Sequence, hit: int) -> bool:
        """Whether a waiting sequence lacks rows of images that it computes, behind its hit; they
        are being encoded then, or once fewer prompts wait for others."""
        if (images := sequence.request.images) is None:
            return False
        if sequence.request in self._failed:  # no other of its sequences asks again
            return True
        lacking = [image for image in images.images if image.image.digest not in images.features]
        behind = {one.image.digest: one.image for one in lacking if one.places[-1] >= hit}
        if behind and sequence not in self._asking:
            if len(self._asking) >= MOST:
                return True
            self._asking[sequence] = None
        there = [self._is_there(image, sequence) for image in behind.values()]  # asks for all
        return not all(there)

    def _is_there(self, image: Image, sequence: Sequence) -> bool:
        assert self.encode is not None and sequence.request.images is not None
        if image.digest not in self._coming:
            if len(self._coming) < MOST:
                future = self._thread.submit(self.encode, image)
                self._coming[image.digest] = future, sequence
            return False
        future, _ = self._coming[image.digest]
        if not future.done():
            return False
        del self._coming[image.digest]
        if (error := future.exception()) is not None:
            self._failed[sequence.request] = error
            return False
        sequence.request.images.features[image.digest] = future.result()
        return True

    def forget(self, sequence: Sequence) -> None:
        """A sequence waits no longer: what was to be encoded for it is not."""
        self._asking.pop(sequence, None)
        for digest, (future, asking) in [*self._coming.items()]:
            if asking is sequence:
                del self._coming[digest]
                future.cancel()

    def take_failed(self) -> dict[Request, BaseException]:
        """The requests whose images failed since the last call, and why."""
        failed, self._failed = self._failed, {}
        return failed

    def wait(self) -> None:
        """Wait a little for an image: nothing can be computed before."""
        if self._coming:
            wait([future for future, _ in self._coming.values()], _WAIT, "FIRST_COMPLETED")

    def close(self) -> None:
        """Encode nothing more, but for the image that is being encoded."""
        self._thread.shutdown(wait=False, cancel_futures=True)
