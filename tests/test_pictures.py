"""What makes the pictures of docs/ small leaves them as they look."""

from __future__ import annotations

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")


def test_a_palette_keeps_common_colours_and_comes_near_the_others() -> None:
    from docs.pictures.camera import COLOURS, with_palette

    rng = np.random.default_rng(0)
    pixels = rng.integers(100, 140, (2, 60, 80, 3), dtype=np.uint8)  # more colours than a palette
    pixels[0, :30], pixels[1, :20, :40] = (250, 249, 247), (227, 155, 60)
    reduced = with_palette([Image.fromarray(image) for image in pixels])
    assert all(len(image.getcolors() or ()) <= COLOURS for image in reduced)
    found = np.stack([np.asarray(image.convert("RGB")) for image in reduced])
    assert (found[0, :30] == (250, 249, 247)).all() and (found[1, :20, :40] == (227, 155, 60)).all()
    assert abs(found.astype(int) - pixels).max() <= 16
