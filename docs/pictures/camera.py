"""A headless Chromium that is looked at in light, in dark and on a phone, and small image files."""

from __future__ import annotations

import base64
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from tests.runtime.server.page.browser import Page, browser

SETTLED = 0.5
"""Seconds after which a page has drawn itself anew in a window of another size."""

COLOURS = 128
"""Of a picture's palette."""

COMMONEST = 32
"""Of them, those that are kept exactly."""


class Look(NamedTuple):
    """A window, in CSS pixels, and its colours."""

    width: int
    height: int
    scheme: str = "light"
    scale: int = 1


LOOKS = {"": Look(1280, 800), "-dark": Look(1280, 800, "dark"), "-phone": Look(390, 844, scale=2)}
"""What is added to a picture's name, and how it is looked at."""


@contextmanager
def window() -> Iterator[Page]:
    """A browser with nothing in its profile."""
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        yield page


def put_on(page: Page, look: Look) -> None:
    """Let the window look like this."""
    scheme = {"name": "prefers-color-scheme", "value": look.scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": look.width, "height": look.height, "deviceScaleFactor": look.scale}
    metrics = {**size, "mobile": look.scale > 1}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def shoot(page: Page) -> Image.Image:
    """What the window shows."""
    answer = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    return Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")


def shoot_looks(page: Page, folder: Path, name: str, part: str) -> None:
    """A picture of the page in each of `LOOKS`, scrolled to this part where it does not fit."""
    for suffix, look in LOOKS.items():
        put_on(page, look)
        page.run("document.querySelector(arguments[0]).scrollIntoView()", part)
        time.sleep(SETTLED)
        save(shoot(page), folder / f"{name}{suffix}.png")


def with_palette(images: Sequence[Image.Image]) -> list[Image.Image]:
    """The images in one palette: the commonest colours as they are, and what is near the others."""
    pixels = np.concatenate([np.asarray(image).reshape(-1, 3) for image in images])
    red, green, blue = pixels.astype(np.int32).T
    codes = red << 16 | green << 8 | blue
    seen, where, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([seen >> 16, seen >> 8 & 255, seen & 255], axis=1)
    commonest = colours[np.argsort(-counts)[:COMMONEST]]
    rest = Image.fromarray(colours[None].astype(np.uint8))
    rest = rest.quantize(COLOURS - COMMONEST, Image.Quantize.MAXCOVERAGE).convert("RGB")
    palette = np.concatenate([commonest, np.unique(np.asarray(rest)[0], axis=0)])
    nearest = ((colours[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    width, height = images[0].size
    found = [Image.fromarray(part) for part in nearest[where].reshape(-1, height, width)]
    for image in found:
        image.putpalette(palette.astype(np.uint8).tobytes())
    return found


def save(image: Image.Image, path: Path) -> None:
    """Write a small PNG."""
    with_palette([image])[0].save(path, optimize=True)
