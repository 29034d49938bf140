"""Random pictures, and what reads them."""

from __future__ import annotations

from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image

from radixcache.runtime.checkpoints.model_files import read_settings
from radixcache.runtime.multimodal.families import ImageFamily, image_family
from radixcache.runtime.multimodal.image import ImageSource
from radixcache.runtime.multimodal.processor import ImageProcessor


def picture(height: int, width: int, seed: int | np.random.Generator = 0) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def source_of(image: Image.Image, **options: object) -> ImageSource:
    """A PNG of it, written with these options."""
    file = BytesIO()
    image.save(file, "PNG", **options)
    data = file.getvalue()
    return ImageSource(sha256(data).digest(), lambda: Image.open(BytesIO(data)).convert("RGB"))


def family_of(path: Path) -> ImageFamily:
    return image_family(read_settings(path) or {})


def processor_of(path: Path, max_rows: int = 1000, fingerprint: bytes = b"") -> ImageProcessor:
    """The processor of a tiny model; skips where it needs torchvision in this transformers."""
    family = family_of(path)
    needed = {"lfm2_vl": "Lfm2VlImageProcessor", "idefics3": "Idefics3ImageProcessorPil"}
    kind = getattr(transformers, needed.get(family.processor.partition(".")[0], ""), None)
    if lacking := getattr(kind, "_backends", None):  # of what stands for a class
        pytest.skip(f"{lacking} are not here")
    return ImageProcessor(path, family, fingerprint, max_rows)
