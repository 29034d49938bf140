"""Images are encoded for prompts that wait, and for no others."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest

from radixcache import SamplingParams
from radixcache.runtime.engine.scheduling.image_encoding import MOST, ImageEncoding
from radixcache.runtime.multimodal.image import Image, PlacedImage
from radixcache.runtime.multimodal.prompt_images import PromptImages
from radixcache.runtime.request import Request, Sequence
from tests.helpers.pictures import image

ROWS = 2


def prompt(*numbers: int, n: int = 1) -> Request:
    """A prompt of one token, and of images one behind the other."""
    images = [
        PlacedImage(image(number), np.arange(1 + at * ROWS, 1 + (at + 1) * ROWS), keys)
        for at, number in enumerate(numbers)
        for keys in [np.full(ROWS, 1000 + number, np.int32)]
    ]
    tokens = np.zeros(1 + ROWS * len(images), np.int32)
    placed = PromptImages(images, len(tokens), axes=False, both_ways=False)
    request = Request(0, None, tokens, SamplingParams(n=n), images=placed)
    request.add_sequences(4, None)
    return request


def sequence(*numbers: int) -> Sequence:
    (only,) = prompt(*numbers).sequences
    return only


class Tower:
    """Encodes an image when it is told to, and knows which."""

    def __init__(self) -> None:
        self.go, self.begun, self.encoded = Event(), Event(), list[int]()
        self.error: Exception | None = None

    def __call__(self, image: Image) -> int:
        number = image.digest[-1]
        self.encoded.append(number)
        self.begun.set()
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return number


@pytest.fixture
def tower() -> Iterator[Tower]:
    tower = Tower()
    yield tower
    tower.go.set()


def finish(encoding: ImageEncoding, *waiting: Sequence) -> None:
    """Ask until none of them waits."""
    for _ in range(2000):
        if not [s for s in waiting if encoding.waits(s, 0)]:
            return
        encoding.wait()
    pytest.fail("they wait for ever")


def test_an_image_that_comes_twice_in_a_prompt_is_asked_for_once(tower: Tower):
    encoding, waiting = ImageEncoding(tower), sequence(1, 2, 1)
    tower.go.set()
    finish(encoding, waiting)
    assert tower.encoded == [1, 2]
    assert waiting.request.images is not None
    assert waiting.request.images.features == {image(1).digest: 1, image(2).digest: 2}


def test_what_only_a_leaving_prompt_asked_for_is_not_encoded(tower: Tower):
    encoding = ImageEncoding(tower)
    leaving, other = sequence(*range(MOST)), sequence(99)
    assert encoding.waits(leaving, 0) and tower.begun.wait(30)
    assert encoding.waits(other, 0)  # there is no place in the queue
    encoding.forget(leaving)
    assert encoding.waits(other, 0)
    tower.go.set()
    finish(encoding, other)
    assert tower.encoded == [0, 99]


def test_another_prompt_gets_the_image_that_a_leaving_one_asked_for(tower: Tower):
    encoding, leaving, other = ImageEncoding(tower), sequence(1, 2), sequence(2)
    assert encoding.waits(leaving, 0) and encoding.waits(other, 0)
    encoding.forget(leaving)
    tower.go.set()
    finish(encoding, other)
    assert tower.encoded[-1] == 2


def test_few_prompts_have_rows_at_hand_while_they_wait(tower: Tower):
    """However long the queue: rows are large."""
    encoding, many = ImageEncoding(tower), [sequence(number) for number in range(3 * MOST)]
    tower.go.set()
    for _ in range(5):
        finish(encoding, *many[:MOST])
        assert all(encoding.waits(s, 0) for s in many[MOST:])
    assert tower.encoded == [*range(MOST)]
    for first in many[:MOST]:
        encoding.forget(first)
    finish(encoding, *many[MOST : 2 * MOST])


def test_an_error_is_that_of_the_request(tower: Tower):
    encoding, request = ImageEncoding(tower), prompt(1, n=3)
    tower.error = RuntimeError("it fell")
    tower.go.set()
    for _ in range(2000):
        encoding.waits(request.sequences[0], 0)
        if failed := encoding.take_failed():
            break
        encoding.wait()
    assert failed == {request: tower.error} and not encoding.take_failed()


def test_after_the_end_no_more_images_are_encoded(tower: Tower):
    encoding = ImageEncoding(tower)
    assert encoding.waits(sequence(1, 2, 3), 0) and tower.begun.wait(30)
    encoding.close()
    tower.go.set()
    encoding._thread.shutdown()  # waits for its thread
    assert tower.encoded == [1]
