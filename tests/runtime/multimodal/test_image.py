"""Keys of images follow from what they show, and no two images begin with one key."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from radixcache.runtime.multimodal.image import ImageKeys
from tests.helpers.pictures import image


def test_keys_are_outside_the_vocabulary_and_the_same_in_every_process() -> None:
    one, other = (ImageKeys(1000).of(image(7, 40)) for _ in range(2))
    assert np.array_equal(one, other) and one.dtype == np.int32
    assert len({*one.tolist()}) == 40 and one.min() >= 1000
    assert not {*one.tolist()} & {*ImageKeys(1000).of(image(8, 40)).tolist()}
    assert np.array_equal(ImageKeys(1000).of(image(7, 9)), one[:9])


def test_no_two_images_begin_with_one_key() -> None:
    """Of three ids for keys, two are in use at a time."""
    keys = ImageKeys(2**31 - 3, most=2)
    firsts = [int(keys.of(image(number))[0]) for number in range(200)]
    assert all(one != other for one, other in pairwise(firsts))
    assert {*firsts} == {2**31 - 3, 2**31 - 2, 2**31 - 1}
