"""Rows are made once for an image, and kept within bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from time import sleep

import pytest
import torch

from radixcache.errors import ModelError
from radixcache.runtime.multimodal.features import ImageFeatures, KeptFeatures
from radixcache.runtime.multimodal.image import Image
from tests.helpers.pictures import image


def encoded(image: Image) -> ImageFeatures:
    """Rows of 64 bytes each."""
    rows = torch.full((image.num_rows, 16), float(image.digest[-1]))
    return ImageFeatures(rows, rows.new_empty(0, *rows.shape))


class Waiting:
    """Encodes once it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.go, self.error = Event(), Event(), error

    def __call__(self, image: Image) -> ImageFeatures:
        self.begun.set()
        assert self.go.wait(30)
        if self.error:
            raise self.error
        return encoded(image)


def test_an_image_is_encoded_once():
    rows = KeptFeatures(encoded)
    first = rows.get(image(1))
    assert rows.get(image(1)) is first and bool((first.rows == 1).all())
    assert (rows.num_encoded, rows.num_hits) == (1, 1) and rows.seconds > 0


def test_the_least_recently_used_go_first():
    rows = KeptFeatures(encoded, max_bytes=3 * 2 * 64)
    for number in (1, 2, 3, 1, 4):  # 4 takes the place of 2
        rows.get(image(number))
    assert (rows.num_encoded, rows.num_hits) == (4, 1)
    for number in (1, 3, 4):
        rows.get(image(number))
    assert rows.num_encoded == 4
    rows.get(image(2))
    assert rows.num_encoded == 5


def test_rows_count_with_those_of_inner_layers_and_may_be_too_many_to_keep():
    def deep(image: Image) -> ImageFeatures:
        rows = encoded(image).rows
        return ImageFeatures(rows, torch.stack([rows] * 3))

    rows = KeptFeatures(deep, max_bytes=4 * 2 * 64)
    rows.get(image(1))
    rows.get(image(2, num_rows=3))  # is too much, and leaves what is kept
    assert rows.get(image(1)).nbytes == 4 * 2 * 64
    assert (rows.num_encoded, rows.num_hits) == (2, 1)
    rows.get(image(3))
    rows.get(image(1))
    assert rows.num_encoded == 4


def test_a_second_thread_waits_for_the_first():
    encode = Waiting()
    rows, together = KeptFeatures(encode), Barrier(5)

    def ask() -> ImageFeatures:
        together.wait(30)
        return rows.get(image(7))

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask) for _ in range(4)]
        together.wait(30)
        assert encode.begun.wait(30)
        sleep(0.05)
        encode.go.set()
        found = {id(each.result(30)) for each in asked}
    assert len(found) == 1 and (rows.num_encoded, rows.num_hits) == (1, 3)


def test_a_hit_does_not_wait_for_another_image():
    encode = Waiting()
    rows = KeptFeatures(encode)
    encode.go.set()
    first = rows.get(image(1))
    encode.go.clear()
    encode.begun.clear()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(rows.get, image(2))
        assert encode.begun.wait(30)
        assert rows.get(image(1)) is first and not other.done()
        encode.go.set()


def test_an_error_leaves_nothing():
    encode = Waiting(ModelError("no weights"))
    rows = KeptFeatures(encode)
    encode.go.set()
    with pytest.raises(ModelError, match="no weights"):
        rows.get(image(7))
    encode.error = None
    assert bool((rows.get(image(7)).rows == 7).all())
    assert rows.num_encoded == 1


def test_rows_that_cannot_be_kept_leave_nobody_waiting(monkeypatch: pytest.MonkeyPatch):
    rows = KeptFeatures(encoded)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "_keep", lambda *_: [][0])
        with pytest.raises(IndexError):
            rows.get(image(7))
    with ThreadPoolExecutor(1) as threads:
        assert bool((threads.submit(rows.get, image(7)).result(30).rows == 7).all())


def test_rows_must_be_as_many_as_their_places():
    rows = KeptFeatures(lambda each: encoded(image(1, num_rows=3)))
    with pytest.raises(ModelError, match="an image of 2 rows was encoded as 3"):
        rows.get(image(1))
